"""One file a technique: what is measured with it on and off. A technique is removed by deleting its file and its line in ablate.py."""
