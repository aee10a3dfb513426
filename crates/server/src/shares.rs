//! Places that the names of API keys share: places in the queue, and places for requests in progress.
//!
//! Half of the places are divided evenly: a name can always have its share, whatever the other names use. The other
//! half goes to the first name that asks. So a name may have more than its share, but never takes the share of another
//! name. No more places are taken than exist. A single name has all of them.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

#[derive(Clone)]
pub(crate) struct Shares(Arc<Inner>);

struct Inner {
    /// Places reserved for each name.
    share: usize,
    /// Places outside all shares.
    common: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    by_name: BTreeMap<Arc<str>, usize>,
    /// Places taken beyond the share of their name.
    common: usize,
}

/// A taken place. Dropping it frees it.
pub(crate) struct Place {
    shares: Shares,
    name: Arc<str>,
}

/// There is no place for this name now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoPlace {
    /// Places that the name has taken. Without names, all places that are taken.
    pub taken: usize,
    /// True if other names have shares that this one cannot take.
    pub is_shared: bool,
}

impl Shares {
    /// There is at least one place for each name. A name that is not in `names` has no share.
    pub fn new(places: usize, names: &[Arc<str>]) -> Self {
        let places = places.max(names.len());
        let share = match names {
            [] => 0,
            [_] => places,
            _ => (places / 2 / names.len()).max(1),
        };
        let by_name = names.iter().map(|name| (name.clone(), 0)).collect();
        let taken = Mutex::new(Taken { by_name, common: 0 });
        Shares(Arc::new(Inner { share, common: places - share * names.len(), taken }))
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.0.taken.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// Places that are taken, over all names.
    pub fn n_taken(&self) -> usize {
        let taken = self.taken();
        let own: usize = taken.by_name.values().map(|&n| n.min(self.0.share)).sum();
        own + taken.common
    }

    /// Returns whether there is a place now. Only a hint: [`Shares::take`] decides.
    pub fn has_room(&self, name: &str) -> bool {
        self.room(&self.taken(), name).is_ok()
    }

    /// `Ok(true)` if the place would be a common one.
    fn room(&self, taken: &Taken, name: &str) -> Result<bool, NoPlace> {
        let own = taken.by_name.get(name);
        match own {
            Some(own) if *own < self.0.share => Ok(false),
            _ if taken.common < self.0.common => Ok(true),
            _ => {
                let is_shared = self.0.share > 0 && taken.by_name.len() > 1;
                Err(NoPlace { taken: own.copied().unwrap_or(taken.common), is_shared })
            }
        }
    }

    pub fn take(&self, name: &Arc<str>) -> Result<Place, NoPlace> {
        let mut taken = self.taken();
        let common = self.room(&taken, name)?;
        taken.common += usize::from(common);
        if let Some(own) = taken.by_name.get_mut(name) {
            *own += 1;
        }
        Ok(Place { shares: self.clone(), name: name.clone() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let share = self.shares.0.share;
        let mut taken = self.shares.taken();
        let common = match taken.by_name.get_mut(&self.name) {
            Some(own) => {
                *own -= 1;
                *own >= share
            }
            None => true,
        };
        taken.common -= usize::from(common);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(n: usize) -> Vec<Arc<str>> {
        (0..n).map(|i| format!("name-{i}").into()).collect()
    }

    /// Take as many places as the name can have.
    fn all(shares: &Shares, name: &Arc<str>) -> Vec<Place> {
        std::iter::from_fn(|| shares.take(name).ok()).collect()
    }

    #[test]
    fn a_name_can_always_have_its_share_and_all_that_is_common() {
        // (places, names, what one can have, what another can have beside it)
        for (places, n, first, second) in [
            (256, 1, 256, 0),
            (256, 2, 192, 64),
            (256, 3, 172, 42),
            (2, 2, 1, 1),
            (5, 2, 4, 1),
            (1, 2, 1, 1), // at least one for each
            (256, 300, 1, 1),
        ] {
            let names = names(n);
            let shares = Shares::new(places, &names);
            let greedy = all(&shares, &names[0]);
            assert_eq!(greedy.len(), first, "{places} places, {n} names");
            assert!(!shares.has_room(&names[0]));
            let refused = shares.take(&names[0]).err();
            assert_eq!(refused, Some(NoPlace { taken: first, is_shared: n > 1 }));
            let others: Vec<Vec<Place>> = names[1..].iter().map(|name| all(&shares, name)).collect();
            assert!(others.iter().all(|places| places.len() == second), "{places} places, {n} names");
            // Never more than exist.
            let total = greedy.len() + others.iter().map(Vec::len).sum::<usize>();
            assert!(total <= places.max(n), "{total} of {places}");
            // All places return.
            drop((greedy, others));
            assert_eq!(shares.taken().common, 0);
            assert!(shares.taken().by_name.values().all(|own| *own == 0));
            assert_eq!(all(&shares, &names[n - 1]).len(), first);
        }
    }

    #[test]
    fn what_is_common_goes_back_first() {
        let names = names(2);
        let shares = Shares::new(8, &names); // 2 each, 4 in common
        let mut greedy = all(&shares, &names[0]);
        assert_eq!(greedy.len(), 6);
        let own = [(); 2].map(|()| shares.take(&names[1]).unwrap());
        assert!(!shares.has_room(&names[1]));
        greedy.pop();
        let borrowed = shares.take(&names[1]).unwrap();
        assert!(shares.take(&names[0]).is_err() && shares.take(&names[1]).is_err());
        // The other way round: the name owns two of three places, and gives back the borrowed one first, whichever is
        // dropped.
        drop(own);
        assert_eq!(shares.taken().common, 3);
        drop(borrowed);
        assert_eq!(shares.taken().common, 3);
        greedy.push(shares.take(&names[0]).unwrap());
        assert_eq!(greedy.len(), 6);
    }

    #[test]
    fn without_names_all_is_common() {
        let shares = Shares::new(3, &[]);
        let held = all(&shares, &"anything".into());
        assert_eq!(held.len(), 3);
        let refused = shares.take(&"other".into()).err();
        assert_eq!(refused, Some(NoPlace { taken: 3, is_shared: false }));
        drop(held);
        assert!(shares.has_room("other"));
    }
}
