//! How many salts a key's name deletes.
//!
//! Every deletion leaves a note in each tier, which nothing removes: the salts that tiers have blocks of are not known, so it is written
//! for any. A name has a number of them at once, and gets as many again in an hour, evenly.
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

const HOUR_S: f64 = 3600.0;

pub(crate) struct Deletions {
    most: f64,
    /// By name. Names are those of keys, so there are few.
    made: Mutex<HashMap<Arc<str>, Made>>,
}

struct Made {
    /// What counts at `at`.
    n: f64,
    at: Instant,
}

impl Deletions {
    pub fn new(most: u32) -> Deletions {
        Deletions { most: most.into(), made: Mutex::default() }
    }

    /// Counts one more of this name at `now`.
    ///
    /// # Errors
    /// It has none left: seconds until it has. Then nothing is counted.
    pub fn count(&self, name: &Arc<str>, now: Instant) -> Result<(), u32> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let made = made.entry(name.clone()).or_insert(Made { n: 0.0, at: now });
        let forgotten = now.saturating_duration_since(made.at).as_secs_f64() / HOUR_S * self.most;
        *made = Made { n: (made.n - forgotten).max(0.0), at: made.at.max(now) };
        let too_many = made.n + 1.0 - self.most;
        if too_many > 1e-6 {
            return Err((too_many / self.most * HOUR_S).ceil() as u32);
        }
        made.n += 1.0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_testing::SplitMix64;
    use std::time::Duration;

    /// No hour has more than twice the number, none but the first has more if they come all the time, and a name that has waited as
    /// long as it was told is served.
    #[test]
    fn a_name_has_so_many_at_once_and_as_many_again_in_an_hour() {
        let (ann, bob): (Arc<str>, Arc<str>) = ("ann".into(), "bob".into());
        let start = Instant::now();
        for most in [1, 7, 100] {
            let (deletions, mut random) = (Deletions::new(most), SplitMix64(most.into()));
            let (mut now, mut served) = (start, Vec::new());
            for _ in 0..2_000 {
                match deletions.count(&ann, now) {
                    Ok(()) => served.push(now),
                    Err(seconds) => {
                        assert!((1..=3600).contains(&seconds), "{seconds}");
                        assert!(deletions.count(&ann, now).is_err(), "asking again changes nothing");
                        now += Duration::from_secs(seconds.into());
                        assert_eq!(deletions.count(&ann, now), Ok(()));
                        served.push(now);
                    }
                }
                now += Duration::from_millis(random.below(3_600_000 / most).into());
                let last =
                    served.iter().rev().take_while(|at| now - **at < Duration::from_secs(3600)).count();
                assert!(last <= 2 * most as usize, "{last} of {most} in an hour");
            }
            (0..most).for_each(|_| assert_eq!(deletions.count(&bob, now), Ok(()), "of her own"));
            assert!(deletions.count(&bob, now).is_err());
            assert_eq!(
                deletions.count(&bob, start),
                deletions.count(&bob, now),
                "no time before the last one"
            );
        }
    }
}
