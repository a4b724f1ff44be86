"""What measures Headrace's own claims: tables beside a peer's, the simulator's truth, rivals, profiles. Never part of
the package."""
