package spiffetls

import "context"

// JudgeAll is one round of Run.
func JudgeAll(g *Governor, ctx context.Context) {
	g.takeRenewed()
	g.judgeAll(ctx)
}
