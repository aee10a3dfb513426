//! Checks that all pools make before they touch any byte.
use crate::error::DeviceError;
use crate::layout::{LayerSpec, LayerState};
use crate::pools::{Attend, MassOf, PoolSpec, Side};
use crate::tensor::Tensor;
use kvist_cache::{LayerId, StepId, StepPlan};

impl PoolSpec {
    /// Checks the spec of pools that keep only K and V: the layout is sound and has no recurrent layers.
    pub fn check_kv_only(&self, device: &str) -> Result<(), DeviceError> {
        self.layout.check()?;
        match self.layout.layers.iter().all(|layer| layer.state == LayerState::Kv) {
            true => Ok(()),
            false => {
                let what = format!("recurrent layers are not supported by device {device}");
                Err(DeviceError::Unsupported(what))
            }
        }
    }

    /// Checks a plan before [`Pools::begin`](crate::Pools::begin): its reads must be filled in.
    pub fn check_begin(&self, plan: &StepPlan) -> Result<(), DeviceError> {
        match plan.has_reads() {
            true => Ok(()),
            false => {
                Err(DeviceError::Unsupported("the plan has no reads: begin with Step::with_reads".into()))
            }
        }
    }

    /// Checks a call of [`Pools::attend`](crate::Pools::attend) in the step that has `begun`, and returns its layer: the
    /// plan is the one that began, the layer exists and passes K and V exactly if it owns them, and all tensors have the
    /// sizes of the plan.
    pub fn check_attend(
        &self,
        begun: Option<StepId>,
        plan: &StepPlan,
        call: &Attend<'_>,
    ) -> Result<LayerSpec, DeviceError> {
        if begun != Some(plan.id()) {
            return Err(DeviceError::StalePlan);
        }
        let layer = self.layer(call.layer)?;
        if call.kv.is_some() != self.layout.owns(usize::from(call.layer.0)) {
            return Err(DeviceError::LayerOrder(call.layer));
        }
        call.check(plan.n_tokens() as usize, self.layout.n_heads as usize, &layer)?;
        Ok(layer)
    }

    /// Checks a call of [`Pools::attention_mass`](crate::Pools::attention_mass) in the step that has `begun`, and returns its
    /// layer.
    pub fn check_mass(
        &self,
        begun: Option<StepId>,
        plan: &StepPlan,
        call: &MassOf<'_>,
    ) -> Result<LayerSpec, DeviceError> {
        if begun != Some(plan.id()) {
            return Err(DeviceError::StalePlan);
        }
        let layer = self.layer(call.layer)?;
        let heads = self.layout.n_heads as usize;
        call.q.check("q", plan.n_tokens() as usize, heads, layer.k_dim as usize)?;
        match call.sinks {
            Some(sinks) if sinks.len() != heads => {
                Err(DeviceError::Shape { what: "sinks", expected: vec![heads], elements: sinks.len() })
            }
            _ => Ok(layer),
        }
    }

    /// Checks a call of [`Pools::store`](crate::Pools::store) in the step that has `begun`, and returns its layer.
    pub fn check_store(
        &self,
        begun: Option<StepId>,
        plan: &StepPlan,
        layer: LayerId,
        k: &Tensor<'_>,
        v: &Tensor<'_>,
    ) -> Result<LayerSpec, DeviceError> {
        if begun != Some(plan.id()) {
            return Err(DeviceError::StalePlan);
        }
        let spec = self.layer(layer)?;
        if !self.layout.owns(usize::from(layer.0)) {
            return Err(DeviceError::LayerOrder(layer));
        }
        let (n, heads) = (plan.n_tokens() as usize, spec.n_kv_heads as usize);
        k.check("k", n, heads, spec.k_dim as usize)?;
        v.check("v", n, heads, spec.v_dim as usize)?;
        Ok(spec)
    }

    /// Checks a call of [`Pools::inspect`](crate::Pools::inspect), whose `row` has so many elements, and returns the layer.
    /// `cells(owner)` is the number of cells that the pool of that layer has grown to.
    pub fn check_inspect(
        &self,
        layer: LayerId,
        side: Side,
        (kv_head, cell): (u32, u32),
        row: usize,
        cells: impl FnOnce(LayerId) -> usize,
    ) -> Result<LayerSpec, DeviceError> {
        let layer = self.layer(layer)?;
        let within = |what, index: u32, len: usize| match (index as usize) < len {
            true => Ok(()),
            false => Err(DeviceError::OutOfRange { what, index: index as usize, len }),
        };
        within("KV head", kv_head, layer.n_kv_heads as usize)?;
        within("cell", cell, cells(layer.owner))?;
        let expected = match side {
            Side::K => layer.k_dim as usize,
            Side::V => layer.v_dim as usize,
        };
        match row == expected {
            true => Ok(layer),
            false => Err(DeviceError::Shape { what: "row", expected: vec![expected], elements: row }),
        }
    }

    fn layer(&self, layer: LayerId) -> Result<LayerSpec, DeviceError> {
        let layers = &self.layout.layers;
        let unknown = DeviceError::UnknownLayer { layer, n_layers: layers.len() };
        layers.get(usize::from(layer.0)).copied().ok_or(unknown)
    }
}
