"""One model over several devices: which part of it each rank holds, how ranks meet, who starts and watches them."""
