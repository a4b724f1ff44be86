"""One file a measurement of techniques on and off; a technique's entry in techniques.py names its file where that has another name."""
