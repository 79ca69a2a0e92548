"""`router key`: a new API key for an account of `data.accounts_file`."""

import re

import click

from kv_runtime.process import print_lines
from router.http.accounts import NAME_PATTERN, new_key


@click.command()
@click.argument("account")
def key(account: str) -> None:
    """Print a new API key, and its account's entry for data.accounts_file.

    The entry has only the key's digest. The key is written nowhere else: give it to the client, who sends it as
    `Authorization: Bearer KEY`.
    """
    if not re.fullmatch(NAME_PATTERN, account):
        raise click.BadParameter(f"found {account!r}, allowed letters, digits, '.', '_' and '-', at most 64")
    secret, digest = new_key()
    print_lines(f"key            {secret}", "", "accounts:", f"  - name: {account}", f'    keys: ["{digest}"]')
