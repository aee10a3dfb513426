//! A model with KV memory, ready to execute the steps of one cache: the one place where steps run. Sessions and the
//! scheduler's executor differ in where their steps come from and in what happens to the logits.
use crate::memory::{CacheConfig, MemoryPlan};
use kvist_cache::{Cache, Step};
use kvist_device::*;
use kvist_model::{Error, Model};
use std::sync::Arc;

pub(crate) struct Runner {
    pub model: Arc<Model>,
    pub network: Box<dyn Network>,
    /// The order in which the pools store the channels of keys, if it is not their own.
    pub channels: Option<Arc<ChannelOrder>>,
    max_rows: usize,
    _activation_bytes: Reservation,
}

impl Runner {
    /// Opens KV pools for `cache` in `backend`; `channels` is the order of the model's channels, if the storage of keys has
    /// outliers. Sets the full memory bound aside in the model's budget first; otherwise two caches that do not fit together
    /// could both start. On `Err` nothing has been allocated.
    pub fn open(
        model: &Arc<Model>,
        registry: &Registry,
        backend: &dyn Backend,
        cache: &Cache,
        config: &CacheConfig,
        channels: Option<Arc<ChannelOrder>>,
    ) -> Result<Runner, Error> {
        registry.check_device(model.device())?;
        let architecture = model.config();
        let plan = MemoryPlan::of_cache(architecture, registry, backend, cache, config)?;
        let bound = plan.usage.with(Purpose::Weights, 0);
        let budget = &model.budget().promise(&bound).map_err(|refused| {
            plan.too_large(architecture, registry, config, 0, refused.free, refused.total)
        })?;
        let activations = budget.reserve(Purpose::Activations, plan.usage.of(Purpose::Activations))?;
        let capacity_cells = cache.capacity_cells();
        let spec = PoolSpec {
            capacity_cells,
            channels: channels.clone(),
            ..config.pool_spec(model.layout(), budget)
        };
        let limits = config.step_limits();
        Ok(Runner {
            network: model.open(backend, &spec, &limits)?,
            channels,
            model: model.clone(),
            max_rows: limits.max_rows,
            _activation_bytes: activations,
        })
    }

    /// Most wanted rows of a step.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Checks that tokens lie inside the vocabulary.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<(), Error> {
        let vocab = self.model.config().vocab;
        match tokens.iter().find(|token| **token as usize >= vocab) {
            Some(&token) => Err(Error::TokenOutsideVocabulary { token, vocab }),
            None => Ok(()),
        }
    }

    /// Transfers between the cache's memory and the host, which follow the last step.
    pub fn transfers(&mut self) -> Transfers<'_> {
        self.network.transfers()
    }

    /// Executes a step. On `Err` the step is abandoned and the cache unchanged.
    pub fn run<'c>(&mut self, step: Step<'c>, inputs: &StepInputs<'_>) -> Result<Computed<'c>, Error> {
        Ok(InFlight::submit(step, &mut *self.network, inputs)?.finish()?)
    }
}
