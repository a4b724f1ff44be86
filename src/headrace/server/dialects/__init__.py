"""The APIs that clients speak, a file each: what a body may hold, the conversation it means, and how the answer reads."""
