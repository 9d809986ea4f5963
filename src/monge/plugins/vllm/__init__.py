"""The plugin for vLLM: exact verification of vLLM's drafts, and drafts from the request's own law.

`additional_config={"monge": {...}}` holds all settings, see `settings.EngineSettings`. Without it
nothing changes. vLLM loads `hooks` in all of its processes.
"""
