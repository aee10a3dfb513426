//! `[kv_events]`: where the server tells routers which prefixes its cache has.
use super::check::bad;
use super::{ConfigError, ServerConfig};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvEventsSection {
    /// Where events are published. Without it there are none.
    #[serde(deserialize_with = "endpoint")]
    pub endpoint: Option<EventEndpoint>,
    /// Where consumers get messages again that they have missed.
    #[serde(deserialize_with = "endpoint")]
    pub replay_endpoint: Option<EventEndpoint>,
    /// The first frame of every message.
    pub topic: String,
    /// Messages that are kept for replays.
    pub buffer: usize,
    /// The key's name whose prompts are published. Needed if keys have several names.
    pub name: Option<String>,
    /// Publish what the tiers in this machine have, too.
    pub tiers: bool,
}

impl Default for KvEventsSection {
    fn default() -> Self {
        KvEventsSection {
            endpoint: None,
            replay_endpoint: None,
            topic: String::new(),
            buffer: 10_000,
            name: None,
            tiers: false,
        }
    }
}

/// `tcp://ADDRESS:PORT`, where `*` stands for every address of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventEndpoint(SocketAddr);

impl EventEndpoint {
    pub fn address(self) -> SocketAddr {
        self.0
    }
}

impl FromStr for EventEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let address = text.strip_prefix("tcp://").and_then(|rest| match rest.strip_prefix("*:") {
            Some(port) => Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port.parse().ok()?)),
            None => rest.parse().ok(),
        });
        let expected =
            "expected tcp://ADDRESS:PORT with an IP address, such as tcp://127.0.0.1:5557 or tcp://*:5557";
        address.map(EventEndpoint).ok_or_else(|| format!("{text:?} is no endpoint: {expected}"))
    }
}

impl fmt::Display for EventEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp://{}", self.0)
    }
}

fn endpoint<'de, D: Deserializer<'de>>(from: D) -> Result<Option<EventEndpoint>, D::Error> {
    String::deserialize(from)?.parse().map(Some).map_err(serde::de::Error::custom)
}

impl KvEventsSection {
    pub(super) fn check(&self, config: &ServerConfig) -> Result<(), ConfigError> {
        let Some(endpoint) = self.endpoint else {
            if let Some(replay) = self.replay_endpoint {
                return Err(bad("kv_events.replay_endpoint", replay, "an `endpoint` too, or neither"));
            }
            if let Some(name) = &self.name {
                return Err(bad("kv_events.name", format!("{name:?}"), "an `endpoint` too, or neither"));
            }
            if self.tiers {
                return Err(bad("kv_events.tiers (--kv-events-tiers)", true, "an `endpoint` too, or false"));
            }
            return Ok(());
        };
        if self.tiers && config.tiers.ram_bytes == 0 && config.tiers.disk_dir.is_none() {
            let expected =
                "a tier in RAM (--tier-ram) or on a disk (--tier-disk): a shared store is not published";
            return Err(bad("kv_events.tiers (--kv-events-tiers)", true, expected));
        }
        if self.replay_endpoint == Some(endpoint) && endpoint.0.port() != 0 {
            return Err(bad("kv_events.replay_endpoint", endpoint, "another port than that of `endpoint`"));
        }
        if !(1..=1 << 20).contains(&self.buffer) {
            return Err(bad("kv_events.buffer", self.buffer, "1 to 1048576 messages"));
        }
        if let Some(keep) = config.cache.keep {
            return Err(bad(
                "kv_events.endpoint",
                endpoint,
                format!(
                    "no cache.keep (\"{keep}\"): thinned texts share no prefixes, so there is nothing to publish"
                ),
            ));
        }
        self.salt(config).map(drop)
    }

    /// The salt of the requests whose blocks are published: of those that send no `cache_salt`, by one name.
    pub fn salt(&self, config: &ServerConfig) -> Result<Arc<str>, ConfigError> {
        let names = config.names();
        match (&self.name, &names[..]) {
            (None, []) => Ok(crate::auth::salt_of_anybody()),
            (None, [name]) => Ok(crate::auth::salt_of_name(name)),
            (Some(asked), names) if names.iter().any(|name| **name == **asked) => {
                Ok(crate::auth::salt_of_name(asked))
            }
            (Some(asked), names) => Err(bad(
                "kv_events.name",
                format!("{asked:?}"),
                match names.is_empty() {
                    true => "no name, because there are no [[keys]]".to_string(),
                    false => format!("a name of [[keys]]: {}", names.join(", ")),
                },
            )),
            (None, names) => Err(bad(
                "kv_events.name",
                "missing",
                format!(
                    "the name whose prompts are published, because names share no blocks: {}",
                    names.join(", ")
                ),
            )),
        }
    }

    /// A warning if other machines can read the events.
    pub(super) fn warning(&self) -> Option<String> {
        let of_all = self.endpoint.into_iter().chain(self.replay_endpoint);
        let reachable = of_all.into_iter().find(|endpoint| !endpoint.0.ip().is_loopback())?;
        Some(format!(
            "KV events on {reachable} contain the tokens of prompts, and ZeroMQ does not ask for a key: let only routers \
             reach this port"
        ))
    }
}
