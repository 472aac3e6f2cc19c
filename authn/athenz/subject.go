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
	if err := s.parts(); err != nil {
		return fmt.Errorf("athenz: pod %.64q in namespace %.64q: %w: %w", s.Pod, s.Namespace, ErrDocument, err)
	}
	return nil
}

func (s PodSubject) parts() error {
	switch {
	case !kube.ValidLabel(s.Namespace) || !kube.ValidName(s.Pod):
		return errors.New("they are not the names of a namespace and of a pod")
	case !s.IP.IsValid():
		return errors.New("the pod has no address, or none yet")
	case s.IP.Zone() != "" || s.IP.Is4In6() || s.IP.IsUnspecified() || s.IP.IsMulticast():
		return fmt.Errorf("%q is not the address of a pod", s.IP)
	}
	return s.Service.Check()
}

// String returns the subject as a URI: pod:NAMESPACE/POD?d=DOMAIN&n=SERVICE&i=IP. The values are form-encoded:
// fd00::1 becomes fd00%3A%3A1.
func (s PodSubject) String() string {
	return "pod:" + s.Namespace + "/" + s.Pod + "?d=" + url.QueryEscape(s.Service.Domain) + "&n=" +
		url.QueryEscape(s.Service.Name) +
		"&i=" + url.QueryEscape(s.IP.String())
}

// parsePodSubject parses the URI that [PodSubject.String] writes; alone it proves nothing. The parameters may be in
// any order, and others are ignored. A duplicate of one of the three is refused. The error wraps [ErrDocument].
func parsePodSubject(text string) (PodSubject, error) {
	s, err := readPodSubject(text)
	if err != nil {
		return PodSubject{}, fmt.Errorf("athenz: pod subject %q: %w: %w", token.Clip(text, token.MaxQuoted),
			ErrDocument, err)
	}
	return s, nil
}

func readPodSubject(text string) (PodSubject, error) {
	rest, ok := strings.CutPrefix(text, "pod:")
	if !ok {
		return PodSubject{}, errors.New(`its scheme is not "pod"`)
	}
	id, query, _ := strings.Cut(rest, "?")
	namespace, pod, _ := strings.Cut(id, "/") // a name contains no other character
	values, err := url.ParseQuery(query)
	if err != nil {
		return PodSubject{}, errors.New("its parameters are not escaped as those of a form")
	}
	for _, key := range []string{"d", "n", "i"} {
		if n := len(values[key]); n != 1 {
			return PodSubject{}, fmt.Errorf("it has the parameter %q %d times, want once", key, n)
		}
	}
	ip, err := netip.ParseAddr(values.Get("i"))
	if err != nil {
		return PodSubject{}, fmt.Errorf("the parameter \"i\" is not an IP address: %.64q", values.Get("i"))
	}
	s := PodSubject{Namespace: namespace, Pod: pod,
		Service: athenzname.Service{Domain: values.Get("d"), Name: values.Get("n")}, IP: ip}
	return s, s.parts()
}
