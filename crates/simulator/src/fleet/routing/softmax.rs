//! Choosing by cost: the lowest, or drawn.
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// A draw with a temperature.
pub(super) struct Softmax {
    temperature: f64,
    random: Xoshiro256PlusPlus,
    weights: Vec<f64>,
}

impl Softmax {
    pub fn new(temperature: f64, seed: u64) -> Softmax {
        Softmax { temperature, random: Xoshiro256PlusPlus::seed_from_u64(seed), weights: Vec::new() }
    }

    /// Whether anything is drawn: at a temperature of 0 the lowest cost is chosen.
    pub fn draws(&self) -> bool {
        self.temperature > 0.0
    }

    /// The index of the lowest of `costs`; of several, a random one. `None` if there are none.
    pub fn lowest(&mut self, costs: &[f64]) -> Option<usize> {
        let lowest = costs.iter().copied().reduce(f64::min)?;
        let n = costs.iter().filter(|cost| **cost == lowest).count();
        let nth = if n > 1 { self.random.random_range(0..n) } else { 0 };
        (0..costs.len()).filter(|&i| costs[i] == lowest).nth(nth)
    }

    /// The index of one of `costs`, each with a probability ∝ exp(−(cost − lowest) / (`unit` · temperature)). `None` if
    /// there are none.
    pub fn draw(&mut self, costs: &[f64], unit: f64) -> Option<usize> {
        let lowest = costs.iter().copied().reduce(f64::min)?;
        let scale = unit * self.temperature;
        self.weights.clear();
        self.weights.extend(costs.iter().map(|cost| {
            let above = cost - lowest;
            if above > 0.0 { (-above / scale).exp() } else { 1.0 }
        }));
        let mut left = self.random.random::<f64>() * self.weights.iter().sum::<f64>();
        for (i, weight) in self.weights.iter().enumerate() {
            if left < *weight {
                return Some(i);
            }
            left -= weight;
        }
        Some(costs.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_the_costs() {
        let mut softmax = Softmax::new(0.5, 7);
        let costs = [3.0, 1.0, 2.0, 1.0];
        let mut drawn = [0u32; 4];
        for _ in 0..100_000 {
            drawn[softmax.draw(&costs, 2.0).unwrap()] += 1;
        }
        let weights = costs.map(|cost: f64| (1.0 - cost).exp());
        let sum: f64 = weights.iter().sum();
        for (n, weight) in drawn.iter().zip(weights) {
            // The standard deviation of a share is less than 0.0016.
            assert!((f64::from(*n) / 1e5 - weight / sum).abs() < 0.01, "{drawn:?}");
        }
        assert_eq!((softmax.draw(&[], 1.0), softmax.lowest(&[])), (None, None));
        let lowest: Vec<_> = (0..100).filter_map(|_| softmax.lowest(&costs)).collect();
        assert!(lowest.contains(&1) && lowest.contains(&3) && lowest.iter().all(|i| [1, 3].contains(i)));
        assert_eq!(softmax.draw(&[5.0, 5.0], 0.0).map(|i| i < 2), Some(true));
    }
}
