//! Checks of a configuration, section by section.
use super::tiers::no_remote_stores;
use super::{ConfigError, ModelSection, ServerConfig, SpeculationSection, TiersSection};
use kvist_cache::evict::{Parameters, build_for_serving};
use kvist_device::Recent;
use kvist_engine::tools::Tooling;
use kvist_scheduler::LengthSource;

pub(super) fn bad(
    field: impl Into<String>,
    found: impl ToString,
    expected: impl Into<String>,
) -> ConfigError {
    ConfigError::Field { field: field.into(), found: found.to_string(), expected: expected.into() }
}

/// The names that the model section chooses.
pub(super) fn model(config: &ServerConfig) -> Result<(), ConfigError> {
    if let Some(name) = &config.model.generation_config
        && !ModelSection::GENERATION_CONFIGS.contains(&name.as_str())
    {
        return Err(bad("model.generation_config", format!("{name:?}"), "auto or none"));
    }
    if let Some(name) = &config.model.tools
        && Tooling::by_name(name).is_err()
    {
        return Err(bad("model.tools", format!("{name:?}"), format!("one of {}", Tooling::NAMES)));
    }
    Ok(())
}

/// Sizes, storage formats, and the names of policies.
pub(super) fn cache_and_scheduler(config: &ServerConfig) -> Result<(), ConfigError> {
    let c = &config.cache;
    if c.tokens == Some(0) {
        return Err(bad("cache.tokens", 0, "at least one block"));
    }
    if c.block_tokens == 0 || c.block_tokens > 4096 {
        return Err(bad("cache.block_tokens", c.block_tokens, "1 to 4096"));
    }
    if (Recent { tokens: c.kv_recent, sequences: 1 }).check().is_err() {
        let expected = format!("a power of two up to {}, or 0", Recent::MAX_TOKENS);
        return Err(bad("cache.kv_recent", c.kv_recent, expected));
    }
    if let Some(v) = c.kv_v.filter(|v| v.outliers) {
        let expected = format!("{}: only K has outlier channels", v.for_values());
        return Err(bad("cache.kv_v", v, expected));
    }
    if config.scheduler.lengths == LengthSource::Oracle {
        return Err(bad(
            "scheduler.lengths",
            "oracle",
            "max_new or running_mean: only the simulator knows the true lengths",
        ));
    }
    build_for_serving(&c.eviction, &Parameters::default())
        .map_err(|e| bad("cache.eviction", format!("{:?}", c.eviction), e.to_string()))?;
    if config.scheduler.tiers.is_some() {
        return Err(bad("scheduler.tiers", "set", "the section [tiers]: the server sets this field itself"));
    }
    if config.scheduler.thinned.is_some() {
        return Err(bad("scheduler.thinned", "set", "cache.keep: the server sets this field itself"));
    }
    if let Some(keep) = c.keep {
        let with = [
            (config.tiers.is_on(), "[tiers]"),
            (config.speculation.is_on(), "speculation.speculate"),
            (config.sessions.dir.is_some(), "sessions.dir"),
        ];
        if let Some((_, what)) = with.into_iter().find(|(is_on, _)| *is_on) {
            return Err(bad(
                "cache.keep",
                format!("\"{keep}\""),
                format!("no {what}: a thinned text is not the whole text"),
            ));
        }
    }
    config.scheduler.check().map_err(|e| bad("scheduler", format!("wrong: {e}"), "see docs/scheduler.md"))?;
    Ok(())
}

/// What proposes drafts, and their limits.
pub(super) fn speculation(config: &ServerConfig) -> Result<(), ConfigError> {
    let s = &config.speculation;
    if !SpeculationSection::MODES.contains(&s.speculate.as_str()) {
        let expected = format!("one of {}", SpeculationSection::MODES.join(", "));
        return Err(bad("speculation.speculate", format!("{:?}", s.speculate), expected));
    }
    match (&s.draft_model, s.speculate.as_str()) {
        (None, "draft") if config.model.path.is_some() => {
            return Err(bad("speculation.draft_model", "not set", "a model, which `draft` needs"));
        }
        (Some(model), "ngram" | "suffix") => {
            let expected = "`draft`, `eagle` or `auto` in speculation.speculate, or no draft model";
            return Err(bad("speculation.draft_model", format!("{:?}", model.display()), expected));
        }
        _ => {}
    }
    let counts = [
        ("draft_tokens", Some(s.draft_tokens), 1024),
        ("draft_depth", s.draft_depth, 1024),
        ("draft_width", s.draft_width, 64),
    ];
    for (name, value, max) in counts {
        let Some(value) = value else { continue };
        if !(1..=max).contains(&value) {
            return Err(bad(format!("speculation.{name}"), value, format!("1 to {max}")));
        }
    }
    Ok(())
}

/// Times and counts.
pub(super) fn limits(config: &ServerConfig) -> Result<(), ConfigError> {
    let l = &config.limits;
    let seconds = [
        ("request_timeout_s", l.request_timeout_s),
        ("header_timeout_s", l.header_timeout_s),
        ("read_timeout_s", l.read_timeout_s),
        ("grace_s", l.grace_s),
    ];
    for (name, value) in seconds {
        let min = if name == "grace_s" { 0.0 } else { 0.001 };
        if !(min..=1e6).contains(&value) {
            return Err(bad(format!("limits.{name}"), value, format!("{min} to 1000000 seconds")));
        }
    }
    let counts = [
        ("max_queue", l.max_queue, 1, 1 << 20),
        ("max_connections", l.max_connections, 1, 1 << 20),
        ("max_body_bytes", l.max_body_bytes, 1 << 10, 1 << 30),
        ("max_header_bytes", l.max_header_bytes, 8 << 10, 1 << 20),
        ("max_choices", l.max_choices as usize, 1, 1 << 12),
        ("max_stop", l.max_stop as usize, 1, 1 << 8),
        ("max_deletions", l.max_deletions as usize, 1, 1 << 20),
    ];
    for (name, value, min, max) in counts {
        if !(min..=max).contains(&value) {
            return Err(bad(format!("limits.{name}"), value, format!("{min} to {max}")));
        }
    }
    Ok(())
}

/// Limits of sessions.
pub(super) fn sessions(config: &ServerConfig) -> Result<(), ConfigError> {
    let s = &config.sessions;
    if !(0.001..=1e9).contains(&s.idle_s) {
        return Err(bad("sessions.idle_s", s.idle_s, "0.001 to 1000000000 seconds"));
    }
    if s.max_sessions > 1 << 20 {
        return Err(bad("sessions.max_sessions", s.max_sessions, "0 to 1048576"));
    }
    if s.max_tokens > 1 << 40 {
        return Err(bad("sessions.max_tokens", s.max_tokens, "0 to 1099511627776"));
    }
    if s.shared && s.shared_store(&config.tiers).is_none() {
        let expected = "false, or a store that the workers share too: tiers.store (--tier-store) or sessions.store \
                        (--sessions-store), such as redis://HOST:6379/PREFIX";
        return Err(bad("sessions.shared (--sessions-shared)", true, expected));
    }
    if s.store.is_some() && !TiersSection::HAS_STORE {
        return Err(bad("sessions.store (--sessions-store)", "a URL", no_remote_stores()));
    }
    Ok(())
}

/// Origins.
pub(super) fn http(config: &ServerConfig) -> Result<(), ConfigError> {
    for origin in &config.http.cors_origins {
        let plain = origin.split_once("://").is_some_and(|(_, host)| !host.is_empty() && !host.contains('/'));
        if origin != "*" && !plain {
            return Err(bad(
                "http.cors_origins",
                format!("{origin:?}"),
                "origins such as https://example.org, or *",
            ));
        }
    }
    Ok(())
}

/// Names and sources of keys, and whether the server may do without.
pub(super) fn keys(config: &ServerConfig) -> Result<(), ConfigError> {
    for (i, key) in config.keys.iter().enumerate() {
        let field = format!("keys[{i}]");
        if key.name.is_empty() || key.name.len() > 64 || key.name.chars().any(char::is_control) {
            return Err(bad(format!("{field}.name"), format!("{:?}", key.name), "1 to 64 bytes of text"));
        }
        let given = [key.key.is_some(), key.key_file.is_some(), key.key_env.is_some()];
        if given.iter().filter(|g| **g).count() != 1 {
            return Err(bad(
                field,
                "missing, or given more than once",
                "one of `key`, `key_file`, `key_env`",
            ));
        }
    }
    if config.keys.is_empty() && !config.http.host.is_loopback() && !config.http.open {
        return Err(bad(
            "http.host",
            config.http.host,
            "a loopback address, because no [[keys]] are configured; or `http.open = true` (--open) to serve everyone",
        ));
    }
    Ok(())
}
