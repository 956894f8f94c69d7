import hlo_opt.testing

hlo_opt.testing.configure(config, lit_config)  # noqa: F821  (lit defines both)
