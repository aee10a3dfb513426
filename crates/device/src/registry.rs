//! Cache kinds and backends by name. Any kind works with any backend, so there are two small tables and no table of
//! pairs.
use crate::device::Footprint;
use crate::error::DeviceError;
use crate::pools::*;
use crate::session::Session;
use kvist_cache::Cache;
use kvist_cache::kinds::{self, GroupSpec, KINDS, KindError, Unbuildable};

/// The device that runs models, the backends in which it can keep K and V, and every cache kind.
pub struct Registry {
    device: Box<dyn Footprint>,
    backends: Vec<Box<dyn Backend>>,
}

#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error("there is no cache {backend}:{kind}; available are {}", known.join(", "))]
    Unknown { backend: String, kind: String, known: Vec<String> },
    #[error("a cache of kind {kind} cannot serve this model: {why}")]
    Kind { kind: String, why: Unbuildable },
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl Registry {
    /// No backends yet.
    pub fn of(device: impl Footprint + 'static) -> Self {
        Registry { device: Box::new(device), backends: Vec::new() }
    }

    pub fn with(mut self, backend: Box<dyn Backend>) -> Self {
        self.backends.push(backend);
        self
    }

    pub fn device(&self) -> &dyn Footprint {
        &*self.device
    }

    /// Checks that this registry plans for the device that a model is on. Threads and instruction sets may differ.
    pub fn check_device(&self, model: &dyn Footprint) -> Result<(), DeviceError> {
        let (model, planned) = (model.info().name, self.device.info().name);
        if model == planned { Ok(()) } else { Err(DeviceError::OtherDevice { model, planned }) }
    }

    /// Every `backend:kind`.
    pub fn pairs(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.backends.iter().flat_map(|b| KINDS.iter().map(move |kind| (b.id(), kind.name)))
    }

    pub fn backend(&self, id: &str) -> Option<&dyn Backend> {
        self.backends.iter().map(|b| &**b).find(|b| b.id() == id)
    }

    /// Builds the bookkeeping of `kind` for these layer groups, and returns it with the backend that will store its
    /// bytes.
    pub fn plan(
        &self,
        backend: &str,
        kind: &str,
        groups: &[GroupSpec],
    ) -> Result<(Cache, &dyn Backend), BuildError> {
        let unknown = || {
            let known = self.pairs().map(|(b, k)| format!("{b}:{k}")).collect();
            BuildError::Unknown { backend: backend.into(), kind: kind.into(), known }
        };
        let backend_of = self.backend(backend).ok_or_else(unknown)?;
        let spaces = groups.iter().map(|group| kinds::build(kind, group)).collect::<Result<Vec<_>, _>>();
        let spaces = spaces.map_err(|why| match why {
            KindError::Unknown { .. } => unknown(),
            KindError::Unbuildable(why) => BuildError::Kind { kind: kind.into(), why },
        })?;
        Ok((Cache::new(spaces), backend_of))
    }

    /// Builds a session of `kind` over `backend`. Takes `spec.capacity_cells` from the kind.
    pub fn session(
        &self,
        backend: &str,
        kind: &str,
        groups: &[GroupSpec],
        spec: &PoolSpec,
    ) -> Result<Session, BuildError> {
        let (cache, backend) = self.plan(backend, kind, groups)?;
        let spec = PoolSpec { capacity_cells: cache.capacity_cells(), ..spec.clone() };
        let pools = backend.pools(&spec)?;
        Ok(Session::new(cache, pools, &spec))
    }
}
