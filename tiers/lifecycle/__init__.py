"""The life of each engine: started, warmed, watched, drained, started again."""
