"""Looking at where time goes: per-stage profiles and GPU captures, free when unused."""
