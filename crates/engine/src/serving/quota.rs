//! A quota of slots that the names of API keys share: slots in the queue, and slots for requests in progress.
//!
//! Half of the slots are divided evenly: a name can always have its share, whatever the other names use. The other
//! half goes to the first name that asks. So a name may have more than its share, but never takes the share of another
//! name. No more slots are taken than exist. A single name has all of them.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// A number of slots, divided among names. Clones share the slots.
#[derive(Clone)]
pub struct KeyQuota(Arc<Inner>);

struct Inner {
    /// Slots reserved for each name.
    share: usize,
    /// Slots outside all shares.
    common: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    by_name: BTreeMap<Arc<str>, usize>,
    /// Slots taken beyond the share of their name.
    common: usize,
}

/// A taken slot. Dropping it frees it.
pub struct QuotaSlot {
    quota: KeyQuota,
    name: Arc<str>,
}

/// There is no slot for this name now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaFull {
    /// Slots that the name has taken. Without names, all slots that are taken.
    pub taken: usize,
    /// True if other names have shares that this one cannot take.
    pub is_shared: bool,
}

impl KeyQuota {
    /// There is at least one slot for each name. A name that is not in `names` has no share.
    pub fn new(slots: usize, names: &[Arc<str>]) -> Self {
        let slots = slots.max(names.len());
        let share = match names {
            [] => 0,
            [_] => slots,
            _ => (slots / 2 / names.len()).max(1),
        };
        let by_name = names.iter().map(|name| (name.clone(), 0)).collect();
        let taken = Mutex::new(Taken { by_name, common: 0 });
        KeyQuota(Arc::new(Inner { share, common: slots - share * names.len(), taken }))
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.0.taken.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// Slots that are taken, over all names.
    pub fn n_taken(&self) -> usize {
        let taken = self.taken();
        let own: usize = taken.by_name.values().map(|&n| n.min(self.0.share)).sum();
        own + taken.common
    }

    /// Returns whether there is a slot now. Only a hint: [`KeyQuota::take`] decides.
    pub fn has_room(&self, name: &str) -> bool {
        self.room(&self.taken(), name).is_ok()
    }

    /// `Ok(true)` if the slot would be a common one.
    fn room(&self, taken: &Taken, name: &str) -> Result<bool, QuotaFull> {
        let own = taken.by_name.get(name);
        match own {
            Some(own) if *own < self.0.share => Ok(false),
            _ if taken.common < self.0.common => Ok(true),
            _ => {
                let is_shared = self.0.share > 0 && taken.by_name.len() > 1;
                Err(QuotaFull { taken: own.copied().unwrap_or(taken.common), is_shared })
            }
        }
    }

    /// Take a slot, until the result is dropped.
    pub fn take(&self, name: &Arc<str>) -> Result<QuotaSlot, QuotaFull> {
        let mut taken = self.taken();
        let common = self.room(&taken, name)?;
        taken.common += usize::from(common);
        if let Some(own) = taken.by_name.get_mut(name) {
            *own += 1;
        }
        Ok(QuotaSlot { quota: self.clone(), name: name.clone() })
    }
}

impl Drop for QuotaSlot {
    fn drop(&mut self) {
        let share = self.quota.0.share;
        let mut taken = self.quota.taken();
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

    /// Take as many slots as the name can have.
    fn all(quota: &KeyQuota, name: &Arc<str>) -> Vec<QuotaSlot> {
        std::iter::from_fn(|| quota.take(name).ok()).collect()
    }

    #[test]
    fn a_name_can_always_have_its_share_and_all_that_is_common() {
        // (slots, names, what one can have, what another can have beside it)
        for (slots, n, first, second) in [
            (256, 1, 256, 0),
            (256, 2, 192, 64),
            (256, 3, 172, 42),
            (2, 2, 1, 1),
            (5, 2, 4, 1),
            (1, 2, 1, 1), // at least one for each
            (256, 300, 1, 1),
        ] {
            let names = names(n);
            let quota = KeyQuota::new(slots, &names);
            let greedy = all(&quota, &names[0]);
            assert_eq!(greedy.len(), first, "{slots} slots, {n} names");
            assert!(!quota.has_room(&names[0]));
            let refused = quota.take(&names[0]).err();
            assert_eq!(refused, Some(QuotaFull { taken: first, is_shared: n > 1 }));
            let others: Vec<Vec<QuotaSlot>> = names[1..].iter().map(|name| all(&quota, name)).collect();
            assert!(others.iter().all(|slots| slots.len() == second), "{slots} slots, {n} names");
            // Never more than exist.
            let total = greedy.len() + others.iter().map(Vec::len).sum::<usize>();
            assert!(total <= slots.max(n), "{total} of {slots}");
            // All slots return.
            drop((greedy, others));
            assert_eq!(quota.taken().common, 0);
            assert!(quota.taken().by_name.values().all(|own| *own == 0));
            assert_eq!(all(&quota, &names[n - 1]).len(), first);
        }
    }

    #[test]
    fn what_is_common_goes_back_first() {
        let names = names(2);
        let quota = KeyQuota::new(8, &names); // 2 each, 4 in common
        let mut greedy = all(&quota, &names[0]);
        assert_eq!(greedy.len(), 6);
        let own = [(); 2].map(|()| quota.take(&names[1]).unwrap());
        assert!(!quota.has_room(&names[1]));
        greedy.pop();
        let borrowed = quota.take(&names[1]).unwrap();
        assert!(quota.take(&names[0]).is_err() && quota.take(&names[1]).is_err());
        // The other way round: the name owns two of three slots, and gives back the borrowed one first, whichever is
        // dropped.
        drop(own);
        assert_eq!(quota.taken().common, 3);
        drop(borrowed);
        assert_eq!(quota.taken().common, 3);
        greedy.push(quota.take(&names[0]).unwrap());
        assert_eq!(greedy.len(), 6);
    }

    #[test]
    fn without_names_all_is_common() {
        let quota = KeyQuota::new(3, &[]);
        let held = all(&quota, &"anything".into());
        assert_eq!(held.len(), 3);
        let refused = quota.take(&"other".into()).err();
        assert_eq!(refused, Some(QuotaFull { taken: 3, is_shared: false }));
        drop(held);
        assert!(quota.has_room("other"));
    }
}
