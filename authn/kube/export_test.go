package kube

import (
	"encoding/json"
	"strconv"

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

// Remember makes n remember the answers to so many questions, and returns how many it remembers.
func (n *NodeAuthorizer) Remember(questions int) int {
	for i := range questions {
		n.last(question{node: "n1", namespace: strconv.Itoa(i)})
	}
	return len(n.known)
}

const MaxQuestions = maxQuestions
