//! Random numbers for ids and seeds.
use std::hash::BuildHasher;
use std::time::Instant;

/// A random id: a client can neither find another client's id by counting nor learn how many ids were drawn between
/// two.
pub fn random_id() -> u128 {
    let half = || u128::from(random_seed());
    half() << 64 | half()
}

/// A random number from the keys that std draws for its hash maps.
pub fn random_seed() -> u64 {
    std::hash::RandomState::new().hash_one(Instant::now())
}
