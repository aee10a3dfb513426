//! What every driver keeps: its first failure, and the kernels that it has compiled. And how words become bytes.
use crate::kernels::Kernel;
use kvist_device::DeviceError;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Locks, also after a panic of another thread: what is behind these locks is whole at any time.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Words as the device has them. Tables of long contexts are many words in every step, so this is a plain copy.
pub fn bytes_of(words: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0; 4 * words.len()];
    for (to, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    bytes
}

/// The first failure of a device. Everything computed after it is void, so it is never cleared. Clones share it.
#[derive(Clone, Debug)]
pub struct Failure {
    device: &'static str,
    first: Arc<Mutex<Option<String>>>,
}

impl Failure {
    /// None yet, of the device of this name.
    pub fn new(device: &'static str) -> Self {
        Failure { device, first: Arc::default() }
    }

    /// Keeps a failure if it is the first. Returns the first.
    pub fn keep(&self, what: impl Into<String>) -> DeviceError {
        let what = lock(&self.first).get_or_insert_with(|| what.into()).clone();
        DeviceError::Failed { device: self.device, what }
    }

    /// # Errors
    /// The first failure.
    pub fn check(&self) -> Result<(), DeviceError> {
        match &*lock(&self.first) {
            Some(what) => Err(DeviceError::Failed { device: self.device, what: what.clone() }),
            None => Ok(()),
        }
    }
}

/// Kernels that have been compiled. `P` is what a driver makes of one.
#[derive(Debug)]
pub struct Compiled<P> {
    all: Mutex<HashMap<Kernel, P>>,
}

impl<P> Default for Compiled<P> {
    fn default() -> Self {
        Compiled { all: Mutex::default() }
    }
}

impl<P: Clone> Compiled<P> {
    /// The compiled kernel; `compile` runs at its first use. Other threads wait meanwhile, so no kernel is compiled twice.
    pub fn get(&self, kernel: &Kernel, compile: impl FnOnce() -> P) -> P {
        let mut all = lock(&self.all);
        match all.get(kernel) {
            Some(found) => found.clone(),
            None => all.entry(kernel.clone()).or_insert(compile()).clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_stays() {
        let failure = Failure::new("gpu");
        assert!(failure.check().is_ok());
        let first = failure.clone().keep("one").to_string();
        assert!(first.contains("gpu") && first.contains("one"), "{first}");
        assert_eq!(failure.keep("two").to_string(), first, "a later failure follows from the first");
        assert_eq!(failure.check().unwrap_err().to_string(), first);
    }

    #[test]
    fn a_kernel_is_compiled_once() {
        let (compiled, mut n) = (Compiled::default(), 0);
        for kernel in [Kernel::Add, Kernel::Rope, Kernel::Add, Kernel::Add] {
            let name = compiled.get(&kernel, || {
                n += 1;
                kernel.name()
            });
            assert_eq!(name, kernel.name());
        }
        assert_eq!(n, 2);
    }
}
