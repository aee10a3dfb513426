//! What K and V depend on.
use crate::channels::hash_of;
use crate::memory::CacheConfig;
use kvist_device::Storage;
use kvist_model::config::ModelConfig;
use kvist_model::weights::WeightFormat;
use kvist_model::{Error, Fingerprint, LateFingerprint, Model, Opened, hash};
use serde::{Deserialize, Serialize};

/// What K and V of a text depend on, except for the machine: another instruction set, device or version of kvist may compute
/// other last bits, and so may other chunks without `--deterministic`. What is stored fits either way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    pub model: Fingerprint,
    /// How the weights are computed with: as stored, or converted.
    pub weights: String,
    /// The hash of the frequencies of RoPE. Those of some models depend on the context.
    pub rope: String,
    pub cache: CacheOrigin,
}

/// The part of a cache's policy that K and V depend on, or what of them is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheOrigin {
    pub k: String,
    pub v: String,
    /// Newest tokens that packed storages also keep in f16; 0 for others.
    pub recent: u32,
    /// Of each layer group: the positions that a query sees, if it does not see all, and the first positions, which stay
    /// visible.
    pub groups: Vec<(Option<u32>, u32)>,
    /// The hash of the order of K's channels, if K are stored with outliers. It is measured when a model's first cache opens
    /// ([`Origin::in_cache`]), so it is `None` before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<String>,
}

/// The windows of all layer groups, in words.
fn windows(groups: &[(Option<u32>, u32)]) -> String {
    let words = |(window, sinks): &(Option<u32>, u32)| match window {
        None => "no window".to_string(),
        Some(window) => format!("a window of {window} and {sinks} sinks"),
    };
    groups.iter().map(words).collect::<Vec<_>>().join(", ")
}

impl Origin {
    pub fn new(
        model: Fingerprint,
        format: WeightFormat,
        config: &CacheConfig,
        architecture: &ModelConfig,
    ) -> Self {
        let groups = config.groups(architecture);
        let cache = CacheOrigin {
            k: config.k.to_string(),
            v: config.v.to_string(),
            recent: config.recent.of_storages(config.k, config.v).tokens,
            groups: groups.iter().map(|group| (group.visibility.window, group.visibility.sinks)).collect(),
            channels: None,
        };
        let frequencies = architecture.ropes.iter().flat_map(|rope| rope.inv_freq(config.context_tokens));
        let frequencies: Vec<u8> = frequencies.flat_map(f32::to_le_bytes).collect();
        Origin { model, weights: format.to_string(), rope: hash(&[&frequencies]), cache }
    }

    /// The same, with what is known only once a cache of `model` with keys in `k` has opened.
    ///
    /// # Errors
    /// None has.
    pub fn in_cache(&self, model: &Model, k: Storage) -> Result<Origin, Error> {
        let order = match (k.outliers, model.channels().get()) {
            (false, _) => None,
            (true, Some(order)) => Some(hash_of(order)),
            (true, None) => {
                return Err(Error::Usage(format!(
                    "no cache in {k} has opened, so the order of its channels is not known"
                )));
            }
        };
        Ok(Origin { cache: CacheOrigin { channels: order, ..self.cache.clone() }, ..self.clone() })
    }

    /// Compares the models alone, before anything is known of the cache.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn check_model(&self, file: &str, now: &Fingerprint) -> Result<(), Error> {
        let same_cache = Origin { model: now.clone(), ..self.clone() };
        self.check(file, &same_cache)
    }

    /// Compares with what is used now. As long as no cache has opened, the order of channels is not compared: it is when the
    /// stored K and V are used.
    ///
    /// # Errors
    /// Names the first difference, with both values.
    pub fn check(&self, file: &str, now: &Origin) -> Result<(), Error> {
        let differs = |what: &str, saved: &str, now: &str, try_: &str| {
            Err(Error::Malformed {
                file: file.into(),
                what: format!("it was made with {what} {saved}, and now that is {now}: {try_}"),
            })
        };
        let short = |hash: &str| hash.get(..12).unwrap_or(hash).to_string() + "…";
        let hashes = [
            ("weights of hash", &self.model.weights, &now.model.weights, "give that model"),
            ("a tokenizer of hash", &self.model.tokenizer, &now.model.tokenizer, "give that model"),
            (
                "an architecture of hash",
                &self.model.config,
                &now.model.config,
                "give that config.json (RoPE and the like), and the same version of kvist",
            ),
        ];
        let rope =
            ("frequencies of RoPE of hash", &self.rope, &now.rope, "they depend on --context: give the same");
        for (what, saved, now, advice) in hashes.into_iter().chain([rope]) {
            if saved != now {
                return differs(what, &short(saved), &short(now), advice);
            }
        }
        let settings = [
            ("--weights", &self.weights, &now.weights),
            ("--kv", &self.cache.k, &now.cache.k),
            ("--kv-v", &self.cache.v, &now.cache.v),
            ("--kv-recent", &self.cache.recent.to_string(), &now.cache.recent.to_string()),
        ];
        for (what, saved, now) in settings {
            if saved != now {
                return differs(what, saved, now, &format!("use {what} {saved}"));
            }
        }
        if self.cache.groups != now.cache.groups {
            let (saved, now) = (windows(&self.cache.groups), windows(&now.cache.groups));
            return differs(
                "--window and --sinks by layer group",
                &saved,
                &now,
                "give the same --window and --sinks",
            );
        }
        if let Some(now) = &now.cache.channels {
            let saved = self.cache.channels.as_deref().unwrap_or("none");
            if saved != now {
                let (saved, now) = (short(saved), short(now));
                let advice = "another device or instruction set ranks the strongest channels of K otherwise: use the one that made it";
                return differs("an order of channels of hash", &saved, &now, advice);
            }
        }
        Ok(())
    }
}

/// What K and V of a loaded model depend on, but for the cache: for programs that open caches of their own later. Hashes the
/// weights when it is first asked.
#[derive(Debug)]
pub struct LateOrigin {
    fingerprint: LateFingerprint,
    format: WeightFormat,
    /// What the frequencies of RoPE were made for.
    context_tokens: u32,
}

impl LateOrigin {
    /// `format` and `context` are those that the model is loaded with.
    ///
    /// # Errors
    /// As [`Opened::late_fingerprint`].
    pub fn new(opened: &Opened, format: WeightFormat, context: Option<u32>) -> Result<Self, Error> {
        let fingerprint = opened.late_fingerprint()?;
        Ok(LateOrigin { fingerprint, format, context_tokens: context.unwrap_or(0) })
    }

    /// What texts in a cache of `model` depend on.
    ///
    /// # Errors
    /// As [`Opened::fingerprint`].
    pub fn of(&self, model: &Model, config: &CacheConfig) -> Result<Origin, Error> {
        let fingerprint = self.fingerprint.get(model.tokenizer())?.clone();
        let as_loaded = CacheConfig { context_tokens: self.context_tokens, ..config.clone() };
        Ok(Origin::new(fingerprint, self.format, &as_loaded, model.config()))
    }
}
