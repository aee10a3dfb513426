//! API keys: authenticates callers, in constant time.
//!
//! Keys are hashed before the comparison, so timing reveals neither their length nor their first characters. A key is
//! compared with every configured key, even after a match. Without keys all callers are the same caller.
use crate::config::sections::{ConfigError, KeySection};
use crate::error::ApiError;
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use std::time::Instant;
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

/// The authenticated sender of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    pub name: Arc<str>,
    pub admin: bool,
    /// Arrival of the request. Deadlines count from here.
    pub arrived: Instant,
}

impl Caller {
    /// Salt for prefix sharing. The name is preceded by its length, so no value of `cache_salt` can produce the salt of
    /// another name.
    pub fn salt(&self, cache_salt: &str) -> Arc<str> {
        salt_of(&self.name, cache_salt)
    }
}

fn salt_of(name: &str, cache_salt: &str) -> Arc<str> {
    format!("{}:{}:{cache_salt}", name.len(), name).into()
}

/// The salt of callers of this name that send no `cache_salt`.
pub(crate) fn salt_of_name(name: &str) -> Arc<str> {
    salt_of(name, "")
}

/// The salt of callers without keys that send no `cache_salt`.
pub fn salt_of_anybody() -> Arc<str> {
    salt_of(ANYBODY, "")
}

/// The keys of a configuration, as hashes.
pub struct Keys {
    keys: Vec<([u8; 32], Caller)>,
}

/// Name of the caller if no keys are configured.
const ANYBODY: &str = "anybody";

/// Shorter keys are too easy to guess.
const MIN_KEY_BYTES: usize = 8;

impl Keys {
    /// Reads files and environment variables.
    pub fn new(sections: &[KeySection]) -> Result<Self, ConfigError> {
        let mut keys: Vec<([u8; 32], Caller)> = Vec::new();
        for (i, section) in sections.iter().enumerate() {
            let bad = |field: &str, found: String, expected: &str| ConfigError::Field {
                field: format!("keys[{i}].{field}"),
                found,
                expected: expected.into(),
            };
            let key = match (&section.key, &section.key_file, &section.key_env) {
                (Some(key), None, None) => key.clone(),
                (None, Some(path), None) => {
                    let text = std::fs::read_to_string(path)
                        .map_err(|source| ConfigError::Read { path: path.clone(), source })?;
                    text.trim_end_matches(['\r', '\n']).to_string()
                }
                (None, None, Some(name)) => std::env::var(name)
                    .map_err(|e| bad("key_env", format!("{name}, and {e}"), "a variable that is set"))?,
                _ => {
                    return Err(bad(
                        "key",
                        "missing, or given more than once".into(),
                        "one of `key`, `key_file`, `key_env`",
                    ));
                }
            };
            if key.len() < MIN_KEY_BYTES || !key.bytes().all(|b| b.is_ascii_graphic()) {
                let found = format!("{} bytes", key.len());
                return Err(bad("key", found, "8 or more printable ASCII characters without spaces"));
            }
            let hash = hash(&key);
            if keys.iter().any(|(other, _)| *other == hash) {
                return Err(bad("key", "the same as another key".into(), "a unique key"));
            }
            let name = section.name.as_str().into();
            keys.push((hash, Caller { name, admin: section.admin, arrived: Instant::now() }));
        }
        Ok(Keys { keys })
    }

    /// Returns whether no keys are configured, so that requests need none.
    pub fn is_open(&self) -> bool {
        self.keys.is_empty()
    }

    /// The names that callers can have, each once.
    pub fn names(&self) -> Vec<Arc<str>> {
        names(self.keys.iter().map(|(_, caller)| &*caller.name))
    }

    /// Identify the caller by these headers. 401 if the key is missing, malformed or unknown.
    pub fn caller(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        if self.is_open() {
            return Ok(Caller { name: ANYBODY.into(), admin: true, arrived: Instant::now() });
        }
        let refuse = |what: &str| ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", what);
        let given = headers
            .get(AUTHORIZATION)
            .ok_or_else(|| refuse("no API key: send it as `Authorization: Bearer KEY`"))?;
        let given = given.to_str().ok().and_then(|text| {
            let (scheme, key) = text.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
        });
        let given = given.ok_or_else(|| refuse("the Authorization header is not `Bearer KEY`"))?;
        let hash = hash(given);
        let (mut found, mut at) = (Choice::from(0), 0u32);
        for (i, (key, _)) in self.keys.iter().enumerate() {
            let same = key.as_slice().ct_eq(hash.as_slice());
            at.conditional_assign(&(i as u32), same);
            found |= same;
        }
        match bool::from(found) {
            true => Ok(Caller { arrived: Instant::now(), ..self.keys[at as usize].1.clone() }),
            false => Err(refuse("this API key is unknown")),
        }
    }
}

/// The names that callers can have, each once, given the names of the configured keys.
pub(crate) fn names<'a>(of_keys: impl Iterator<Item = &'a str>) -> Vec<Arc<str>> {
    let mut names: Vec<Arc<str>> = of_keys.map(Into::into).collect();
    if names.is_empty() {
        names.push(ANYBODY.into());
    }
    names.sort();
    names.dedup();
    names
}

fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn section(name: &str, key: &str) -> KeySection {
        KeySection { name: name.into(), key: Some(key.into()), ..KeySection::default() }
    }

    #[test]
    fn keys_are_told_apart() {
        let keys = Keys::new(&[
            section("ann", "ann-secret"),
            KeySection { admin: true, ..section("ops", "ops-secret") },
        ])
        .unwrap();
        let caller = |text: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(text) = text {
                headers.insert(AUTHORIZATION, HeaderValue::from_str(text).unwrap());
            }
            keys.caller(&headers).map(|c| (c.name.to_string(), c.admin)).map_err(|e| e.status.as_u16())
        };
        assert_eq!(caller(Some("Bearer ann-secret")), Ok(("ann".into(), false)));
        assert_eq!(caller(Some("bearer  ops-secret ")), Ok(("ops".into(), true)));
        for bad in [
            None,
            Some("Bearer"),
            Some("Bearer "),
            Some("ann-secret"),
            Some("Basic ann-secret"),
            Some("Bearer ann-secre"),
            Some("Bearer ann-secret1"),
            Some("Bearer ANN-SECRET"),
        ] {
            assert_eq!(caller(bad), Err(401), "{bad:?}");
        }
    }

    #[test]
    fn bad_keys_are_refused_at_the_start() {
        let table = [
            (vec![section("a", "short")], "keys[0].key"),
            (vec![section("a", "with a space")], "keys[0].key"),
            (vec![section("a", "same-same"), section("b", "same-same")], "keys[1].key"),
            (
                vec![KeySection {
                    name: "a".into(),
                    key_env: Some("KVIST_NO_SUCH".into()),
                    ..Default::default()
                }],
                "key_env",
            ),
            (
                vec![KeySection { name: "a".into(), key_file: Some("no/such".into()), ..Default::default() }],
                "no/such",
            ),
        ];
        for (sections, words) in table {
            let error = Keys::new(&sections).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(words), "{error:?} does not say {words:?}");
        }
    }

    /// No two names can send salts that collide.
    #[test]
    fn salts_never_meet() {
        let names = ["a", "a:", "1:a", "a:b", "", "1", ":"];
        let salts = ["", "a", ":", "b", ":b", "1:a:", "a:b"];
        let mut seen = std::collections::BTreeMap::new();
        for name in names {
            for salt in salts {
                let caller = Caller { name: name.into(), admin: false, arrived: Instant::now() };
                let before = seen.insert(caller.salt(salt), (name, salt));
                assert_eq!(before, None, "{name:?} with {salt:?}");
            }
        }
    }
}
