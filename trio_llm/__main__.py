"""`python -m trio_llm` is `trio-llm`."""

from trio_llm.cli.main import main

main()
