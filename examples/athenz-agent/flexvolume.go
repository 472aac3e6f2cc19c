package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/svidkit/svidkit/examples/athenz-agent/nodeagent"
	"github.com/svidkit/svidkit/examples/internal/program"
)

// flexvolume is the FlexVolume driver. The kubelet calls it with init, with mount, a path and options in JSON, and
// with unmount and the path. It answers other calls with "Not supported".
func flexvolume(args, environ []string, out io.Writer) error {
	answer := map[string]any{"status": "Success"}
	s, err := program.Daemon{Variables: variables}.Read(environ)
	switch n := len(args); {
	case err != nil:
	case n == 1 && args[0] == "init":
		answer["capabilities"] = map[string]bool{"attach": false}
	case n == 3 && args[0] == "mount":
		err = mountVolume(s, args[1], args[2])
	case n == 2 && args[0] == "unmount":
		err = unmountVolume(s, args[1])
	default:
		answer = map[string]any{"status": "Not supported", "message": fmt.Sprintf("%.100q", args[:min(n, 1)])}
	}
	if err != nil {
		answer = map[string]any{"status": "Failure", "message": err.Error()}
	}
	if err = json.NewEncoder(out).Encode(answer); err == nil && answer["message"] != nil {
		err = program.ErrAnswered
	}
	return err
}

// mountVolume records the pod of a volume, and mounts its files at path: the handle, in the file id, and the
// directory connect with the agent's socket.
func mountVolume(s program.Settings, path, options string) error {
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
	if err := unmountVolume(s, path); err != nil { // left by an earlier call
		return err
	}
	handle, err := nodeagent.Volumes(s.Text("VOLUMES_DIR")).Add(path, pod.Namespace, pod.Name)
	if err != nil {
		return err
	}
	seen := filepath.Join(s.Text("VOLUMES_DIR"), handle, "mount")
	err = cmp.Or( // attempt each in this order; undo all after a failure
		os.MkdirAll(path, 0o750),
		os.MkdirAll(filepath.Join(seen, "connect"), 0o755), // each user in the pod may enter
		bind(seen, path),
		bind(filepath.Dir(s.Text("AGENT_SOCKET")), filepath.Join(path, "connect")),
	)
	if err != nil {
		return errors.Join(err, unmountVolume(s, path))
	}
	return nil
}

// unmountVolume unmounts the volume at a path, if any, and forgets it.
func unmountVolume(s program.Settings, path string) error {
	if err := errors.Join(unbind(filepath.Join(path, "connect")), unbind(path)); err != nil {
		return err
	}
	return nodeagent.Volumes(s.Text("VOLUMES_DIR")).Remove(path)
}
