//! A quota of permits that tenants share: permits in the queue, and permits for requests in progress.
//!
//! Half of the permits are divided evenly: a tenant can always have its share, whatever the other tenants use. The
//! other half goes to the first tenant that asks. So a tenant may have more than its share, but never takes the share
//! of another tenant. No more permits are taken than exist. A single tenant has all of them.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// A number of permits, divided among tenants. Clones share the permits.
#[derive(Clone)]
pub struct TenantQuota(Arc<Inner>);

struct Inner {
    /// Permits reserved for each tenant.
    share: usize,
    /// Permits outside all shares.
    common: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    by_tenant: BTreeMap<Arc<str>, usize>,
    /// Permits taken beyond the share of their tenant.
    common: usize,
}

/// A taken permit. Dropping it frees it.
pub struct QuotaPermit {
    quota: TenantQuota,
    tenant: Arc<str>,
}

/// There is no permit for this tenant now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaFull {
    /// Permits that the tenant has taken. Without tenants, all permits that are taken.
    pub taken: usize,
    /// True if other tenants have shares that this one cannot take.
    pub is_shared: bool,
}

impl TenantQuota {
    /// There is at least one permit for each tenant. A tenant that is not in `tenants` has no share.
    pub fn new(permits: usize, tenants: &[Arc<str>]) -> Self {
        let permits = permits.max(tenants.len());
        let share = match tenants {
            [] => 0,
            [_] => permits,
            _ => (permits / 2 / tenants.len()).max(1),
        };
        let by_tenant = tenants.iter().map(|tenant| (tenant.clone(), 0)).collect();
        let taken = Mutex::new(Taken { by_tenant, common: 0 });
        TenantQuota(Arc::new(Inner { share, common: permits - share * tenants.len(), taken }))
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.0.taken.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// Permits that are taken, over all tenants.
    pub fn n_taken(&self) -> usize {
        let taken = self.taken();
        let own: usize = taken.by_tenant.values().map(|&n| n.min(self.0.share)).sum();
        own + taken.common
    }

    /// The most permits that this tenant can have at a time, if the others have none.
    pub fn most(&self, tenant: &str) -> usize {
        match self.taken().by_tenant.contains_key(tenant) {
            true => self.0.share + self.0.common,
            false => self.0.common,
        }
    }

    /// Returns whether there is a permit now. Only a hint: [`TenantQuota::take`] decides.
    pub fn has_room(&self, tenant: &str) -> bool {
        self.room(&self.taken(), tenant).is_ok()
    }

    /// `Ok(true)` if the permit would be a common one.
    fn room(&self, taken: &Taken, tenant: &str) -> Result<bool, QuotaFull> {
        let own = taken.by_tenant.get(tenant);
        match own {
            Some(own) if *own < self.0.share => Ok(false),
            _ if taken.common < self.0.common => Ok(true),
            _ => {
                let is_shared = self.0.share > 0 && taken.by_tenant.len() > 1;
                Err(QuotaFull { taken: own.copied().unwrap_or(taken.common), is_shared })
            }
        }
    }

    /// Take a permit, until the result is dropped.
    pub fn take(&self, tenant: &Arc<str>) -> Result<QuotaPermit, QuotaFull> {
        let mut taken = self.taken();
        let common = self.room(&taken, tenant)?;
        taken.common += usize::from(common);
        if let Some(own) = taken.by_tenant.get_mut(tenant) {
            *own += 1;
        }
        Ok(QuotaPermit { quota: self.clone(), tenant: tenant.clone() })
    }
}

impl Drop for QuotaPermit {
    fn drop(&mut self) {
        let share = self.quota.0.share;
        let mut taken = self.quota.taken();
        let common = match taken.by_tenant.get_mut(&self.tenant) {
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

    fn tenants(n: usize) -> Vec<Arc<str>> {
        (0..n).map(|i| format!("tenant-{i}").into()).collect()
    }

    /// Take as many permits as the tenant can have.
    fn all(quota: &TenantQuota, tenant: &Arc<str>) -> Vec<QuotaPermit> {
        std::iter::from_fn(|| quota.take(tenant).ok()).collect()
    }

    #[test]
    fn a_tenant_can_always_have_its_share_and_all_that_is_common() {
        // (permits, tenants, what one can have, what another can have beside it)
        for (permits, n, first, second) in [
            (256, 1, 256, 0),
            (256, 2, 192, 64),
            (256, 3, 172, 42),
            (2, 2, 1, 1),
            (5, 2, 4, 1),
            (1, 2, 1, 1), // at least one for each
            (256, 300, 1, 1),
        ] {
            let tenants = tenants(n);
            let quota = TenantQuota::new(permits, &tenants);
            let greedy = all(&quota, &tenants[0]);
            assert_eq!(greedy.len(), first, "{permits} slots, {n} tenants");
            assert_eq!(quota.most(&tenants[0]), first);
            assert!(!quota.has_room(&tenants[0]));
            let refused = quota.take(&tenants[0]).err();
            assert_eq!(refused, Some(QuotaFull { taken: first, is_shared: n > 1 }));
            let others: Vec<Vec<QuotaPermit>> =
                tenants[1..].iter().map(|tenant| all(&quota, tenant)).collect();
            assert!(others.iter().all(|permits| permits.len() == second), "{permits} slots, {n} tenants");
            // Never more than exist.
            let total = greedy.len() + others.iter().map(Vec::len).sum::<usize>();
            assert!(total <= permits.max(n), "{total} of {permits}");
            // All permits return.
            drop((greedy, others));
            assert_eq!(quota.taken().common, 0);
            assert!(quota.taken().by_tenant.values().all(|own| *own == 0));
            assert_eq!(all(&quota, &tenants[n - 1]).len(), first);
        }
    }

    #[test]
    fn what_is_common_goes_back_first() {
        let tenants = tenants(2);
        let quota = TenantQuota::new(8, &tenants); // 2 each, 4 in common
        let mut greedy = all(&quota, &tenants[0]);
        assert_eq!(greedy.len(), 6);
        let own = [(); 2].map(|()| quota.take(&tenants[1]).unwrap());
        assert!(!quota.has_room(&tenants[1]));
        greedy.pop();
        let borrowed = quota.take(&tenants[1]).unwrap();
        assert!(quota.take(&tenants[0]).is_err() && quota.take(&tenants[1]).is_err());
        // The other way round: the tenant owns two of three permits, and gives back the borrowed one first, whichever
        // is dropped.
        drop(own);
        assert_eq!(quota.taken().common, 3);
        drop(borrowed);
        assert_eq!(quota.taken().common, 3);
        greedy.push(quota.take(&tenants[0]).unwrap());
        assert_eq!(greedy.len(), 6);
    }

    #[test]
    fn without_tenants_all_is_common() {
        let quota = TenantQuota::new(3, &[]);
        let permits = all(&quota, &"anything".into());
        assert_eq!((permits.len(), quota.most("anything")), (3, 3));
        let refused = quota.take(&"other".into()).err();
        assert_eq!(refused, Some(QuotaFull { taken: 3, is_shared: false }));
        drop(permits);
        assert!(quota.has_room("other"));
    }
}
