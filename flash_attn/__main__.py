"""``python -m flash_attn``: see ``flash_attn/cli``."""

import sys

from flash_attn.cli import main

if __name__ == "__main__":
    sys.exit(main())
