package spiffetls

import "context"

// JudgeAll is one round of Run.
func JudgeAll(g *Governor, ctx context.Context) {
	g.listen(nil, true)
	g.judgeAll(ctx)
}

// Hooked returns how many connections the hook of net/http knows.
func Hooked(g *Governor) int {
	n := 0
	g.hooked.Range(func(_, _ any) bool {
		n++
		return true
	})
	return n
}
