package spiffe

// Pod is a Kubernetes pod that a caller runs in or a certificate is for. A field that is not proven is empty. The
// audit records of package ca have the same JSON members.
type Pod struct {
	Cluster        string `json:"cluster,omitempty"` // whose API server proved the rest; empty for the server's own
	Namespace      string `json:"namespace,omitempty"`
	ServiceAccount string `json:"service_account,omitempty"`

	Name string `json:"pod,omitempty"`     // empty for a proof that is not bound to a pod
	UID  string `json:"pod_uid,omitempty"` // of the pod
	Node string `json:"node,omitempty"`    // that the pod runs on

	ServiceAccountUID string `json:"service_account_uid,omitempty"`
	NodeUID           string `json:"node_uid,omitempty"`
}
