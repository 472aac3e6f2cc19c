package athenz

import (
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"strings"

	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/tokens/token"
)

// PodSubject is the subject of an identity document: its description of a pod. It is comparable.
type PodSubject struct {
	Namespace, Pod string // the names
	Service        athenzname.Service
	IP             netip.Addr
}

// check reports whether each part is present and valid. A pod without an address gets no document yet. The error
// wraps [ErrDocument].
func (s PodSubject) check() error {
	err := s.Service.Check()
	switch {
	case !kube.ValidLabel(s.Namespace) || !kube.ValidName(s.Pod):
		err = errors.New("they are not the names of a namespace and of a pod")
	case !s.IP.IsValid():
		err = errors.New("the pod has no address, or none yet")
	case s.IP.Zone() != "" || s.IP.Is4In6() || s.IP.IsUnspecified() || s.IP.IsMulticast():
		err = fmt.Errorf("%q is not the address of a pod", s.IP)
	}
	if err != nil {
		return bad("pod %.64q in namespace %.64q: %w", s.Pod, s.Namespace, err)
	}
	return nil
}

// uri returns the subject as a URI: pod:NAMESPACE/POD?d=DOMAIN&n=SERVICE&i=IP. The values are form-encoded: fd00::1
// becomes fd00%3A%3A1.
func (s PodSubject) uri() string {
	return "pod:" + s.Namespace + "/" + s.Pod + "?d=" + url.QueryEscape(s.Service.Domain) + "&n=" +
		url.QueryEscape(s.Service.Name) + "&i=" + url.QueryEscape(s.IP.String())
}

// parsePodSubject parses the URI that [PodSubject.uri] returns; alone it proves nothing. The parameters may be in any
// order, and others are ignored. A duplicate of one of the three is refused. The error wraps [ErrDocument].
func parsePodSubject(text string) (PodSubject, error) {
	rest, ok := strings.CutPrefix(text, "pod:")
	id, query, _ := strings.Cut(rest, "?")
	namespace, pod, _ := strings.Cut(id, "/") // a name contains no other character
	values, errQuery := url.ParseQuery(query)
	ip, errIP := netip.ParseAddr(values.Get("i"))
	once := len(values["d"]) == 1 && len(values["n"]) == 1 && len(values["i"]) == 1
	if !ok || errQuery != nil || errIP != nil || !once {
		return PodSubject{}, bad("the subject %q is not pod:NAMESPACE/POD?d=DOMAIN&n=SERVICE&i=IP",
			token.Clip(text, token.MaxQuoted))
	}
	s := PodSubject{namespace, pod, athenzname.Service{Domain: values.Get("d"), Name: values.Get("n")}, ip}
	if err := s.check(); err != nil {
		return PodSubject{}, err
	}
	return s, nil
}
