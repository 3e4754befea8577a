"""Set what each tenant may have, and see what it has had.

A request belongs to the tenant in its field `tenant`, which a key of the gateway sets. While
several tenants wait, each gets tokens in proportion to its weight. A tenant that nobody has set has
weight 1 and no limits. Changes count at once, and end nothing that was accepted.

Examples:
  tokenyard tenants set research --weight 4 --tokens-per-day 50000000
  tokenyard tenants list
  tokenyard tenants show research
  tokenyard tenants apply tenants.toml --dry-run
  tokenyard tenants usage --days 7

Exit statuses:
  0  done, or nothing to change
  1  no such tenant, or others have changed it meanwhile
  2  wrong usage, or mistakes in the file
  3  no broker
"""

from __future__ import annotations

from tokenyard.cli.shared.operating import command
from tokenyard.cli.tenants.apply import apply_file
from tokenyard.cli.tenants.list import list_all, show, show_usage
from tokenyard.ops import tenants as ops
from tokenyard.process.program import PlainGroup

tenants = PlainGroup(
    "tenants",
    help=__doc__,
    short_help="Shares, limits and usage of tenants.",
    commands=[
        list_all,
        show,
        command(ops.set_one, "set", "Set share and limits of one.", arguments=["tenant"]),
        command(ops.remove, "remove", "Remove settings."),
        apply_file,
        show_usage,
    ],
)
