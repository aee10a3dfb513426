//! A table of step costs at the speed that the machine had while it served.
use kvist_simulator::cost::{BatchShape, StepCost};

/// Steps that take `factor` times as long as `costs` says.
pub struct AtSpeed<'a> {
    pub costs: &'a dyn StepCost,
    pub factor: f64,
}

impl StepCost for AtSpeed<'_> {
    fn step_ns(&self, batch: &BatchShape) -> u64 {
        let ns = self.costs.step_ns(batch);
        if ns == 0 { 0 } else { ((ns as f64 * self.factor).round() as u64).max(1) }
    }

    fn name(&self) -> String {
        format!("{}, times × {:.3}", self.costs.name(), self.factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_simulator::cost::ConstantRates;

    #[test]
    fn every_step_takes_so_much_longer() {
        let costs = ConstantRates::new(10.0, 1.0).unwrap();
        let slow = AtSpeed { costs: &costs, factor: 1.5 };
        let mut batch = BatchShape::default();
        assert_eq!(slow.step_ns(&batch), 0, "an empty batch takes no time");
        batch.add_prefill(0, 100);
        batch.add_decode(7);
        assert_eq!((costs.step_ns(&batch), slow.step_ns(&batch)), (11_000_000, 16_500_000));
        assert!(slow.name().ends_with("times × 1.500"), "{}", slow.name());
    }
}
