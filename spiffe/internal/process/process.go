// Package process tells a process of this machine from a later one with the same PID, on Linux.
package process

import (
	"bytes"
	"fmt"
	"os"
	"strings"
)

// Started is the process that has, or had, a PID and began at a time. The zero Started is no process.
type Started struct {
	PID int32
	at  string // in ticks since the machine has started; "" if there is no such process
}

// Find returns the process that has a PID now. It may have ended already, and has on systems other than Linux.
func Find(pid int32) Started { return Started{pid, startOf(pid)} }

// Ended reports whether the process has ended, even if it waits for its parent (zombie).
func (s Started) Ended() bool { return s.at == "" || startOf(s.PID) != s.at }

func startOf(pid int32) string {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])) // after its name, which may have spaces
	if len(fields) < 20 || strings.Contains("ZXx", fields[0]) {               // from the third field of proc_pid_stat(5)
		return ""
	}
	return fields[19]
}

// Status returns the fields of /proc/PID/status. There are none if there is no such process.
func Status(pid int32) map[string]string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	fields := make(map[string]string)
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		fields[name] = strings.TrimSpace(value)
	}
	return fields
}
