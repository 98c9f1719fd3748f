"""``python -m app.utils.vec_inf_multinode.cli``, where no script is installed."""

from .main import main

main()
