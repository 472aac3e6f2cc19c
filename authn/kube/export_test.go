package kube

import (
	"context"
	"encoding/json"
	"strconv"

	k8s "github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/spiffe"
)

// Judge reads an answer of a TokenReview and judges it, as Review does.
func Judge(answer []byte, token string, wanted []string) (*spiffe.Pod, error) {
	var r tokenReview
	if err := json.Unmarshal(answer, &r); err != nil {
		return nil, err
	}
	return r.Status.account(token, wanted)
}

func ParseUsername(s string) (namespace, name string, err error) { return k8s.ParseUser(s) }

// See has n look at places in its memory.
func (n *NodeAuthorizer) See(places int) {
	for i := range places {
		r, _ := n.take(context.Background(), place{"n1", strconv.Itoa(i)}, "")
		<-r.turn
	}
}

// Remembered returns how many places n remembers.
func (n *NodeAuthorizer) Remembered() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.nodes)
}

const MaxNodes = maxNodes
