"""`dfirst bench`: what a hand-over costs, measured side by side with what it is compared with."""
