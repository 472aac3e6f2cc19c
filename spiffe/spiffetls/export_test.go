package spiffetls

// JudgeAll is one round of Run.
var JudgeAll = (*Governor).judgeAll
