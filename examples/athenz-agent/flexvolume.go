package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/svidkit/svidkit/caclient/athenz/nodeagent"
)

// driverName is a name of the program by which it is the driver of FlexVolumes, as the kubelet calls one without more arguments.
const driverName = "athenz-volume-driver"

// errAnswered says that a failure was told in an answer to the kubelet, which reads what is written to standard error, too.
var errAnswered = errors.New("the answer says what has failed")

// driverAnswer is what the kubelet reads.
type driverAnswer struct {
	Status       string           `json:"status"`
	Message      string           `json:"message"`
	Capabilities *map[string]bool `json:"capabilities,omitempty"`
}

// flexvolume is the driver of FlexVolumes. The kubelet calls it with init, with mount, a path and options in JSON, and with unmount
// and the path. It answers other calls with "Not supported".
func flexvolume(args, environ []string, out io.Writer) error {
	answer := driverAnswer{Status: "Success"}
	s, err := read(environ)
	switch call := strings.Join(args[:min(1, len(args))], ""); {
	case err != nil:
	case call == "init" && len(args) == 1:
		answer.Capabilities = &map[string]bool{"attach": false}
	case call == "mount" && len(args) == 3:
		err = mountVolume(s, args[1], args[2])
	case call == "unmount" && len(args) == 2:
		err = unmountVolume(s, args[1])
	default:
		answer = driverAnswer{Status: "Not supported", Message: fmt.Sprintf("%.100q with %d arguments", call, max(len(args)-1, 0))}
	}
	if err != nil {
		answer = driverAnswer{Status: "Failure", Message: err.Error()}
	}
	if err := json.NewEncoder(out).Encode(answer); err != nil || answer.Status == "Success" {
		return err
	}
	return errAnswered
}

// mountVolume notes the pod of a volume, and mounts at a path what the pod sees: its handle, in the file id, and the folder connect
// with the socket of the agent.
func mountVolume(s settings, path, options string) error {
	var pod struct {
		Name      string `json:"kubernetes.io/pod.name"`
		Namespace string `json:"kubernetes.io/pod.namespace"`
		UID       string `json:"kubernetes.io/pod.uid"`
	}
	if err := json.Unmarshal([]byte(options), &pod); err != nil {
		return errors.New("the options of the volume are not the JSON of the kubelet")
	}
	if !strings.Contains(path, "/pods/"+pod.UID+"/") {
		return fmt.Errorf("the path %q is not one of the pod %q, whose UID is %q", path, pod.Name, pod.UID)
	}
	if err := unmountVolume(s, path); err != nil { // what a call before has left
		return err
	}
	handle, err := nodeagent.Volumes(s["VOLUMES_DIR"]).Add(path, pod.Namespace, pod.Name)
	if err != nil {
		return err
	}
	seen := filepath.Join(s["VOLUMES_DIR"], handle, "mount")
	err = os.MkdirAll(path, 0o750)
	if err == nil {
		err = os.MkdirAll(filepath.Join(seen, "connect"), 0o755) //nolint:gosec // each user in the pod may enter
	}
	if err == nil {
		err = bind(seen, path)
	}
	if err == nil {
		err = bind(filepath.Dir(s["AGENT_SOCKET"]), filepath.Join(path, "connect"))
	}
	if err != nil {
		err = errors.Join(err, unmountVolume(s, path))
	}
	return err
}

// unmountVolume takes away what is mounted at a path, if anything is, and forgets the volume.
func unmountVolume(s settings, path string) error {
	if err := errors.Join(unbind(filepath.Join(path, "connect")), unbind(path)); err != nil {
		return err
	}
	return nodeagent.Volumes(s["VOLUMES_DIR"]).Remove(path)
}
