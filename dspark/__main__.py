"""`python -m dspark`: the same as the `dspark` command."""

import sys

from dspark.cli import main

if __name__ == "__main__":
    sys.exit(main())
