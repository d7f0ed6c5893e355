"""`python -m canary_obs` is `canary-obs`."""

from canary_obs.cli import main

if __name__ == "__main__":
    main()
