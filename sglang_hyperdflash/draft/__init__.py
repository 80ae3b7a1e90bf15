"""What a drafter is: its configuration, its tensors, its reducer and the target's hc_head."""
