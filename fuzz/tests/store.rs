//! The fuzzer's bytes as a stored block: whatever a disk or a server returns, only whole blocks of the right key pass.
mod changed;

use changed::changed;
use kvist_store::{Check, Frame, KeyChain, Opened};
use std::time::SystemTime;

/// Iterations of an ordinary test run; a fuzzing engine sets its own number.
const ITERATIONS: usize = 5_000;

#[test]
fn store_frame() {
    let key = KeyChain::root(b"fuzz", "").next(&[1, 2, 3]);
    let open =
        |bytes: &[u8]| Frame::split(bytes.to_vec().into()).open(&key, SystemTime::UNIX_EPOCH, Check::Blake3);
    bolero::check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| {
        // The frame of the same bytes is what `put` would have written.
        if let Ok(Opened::Block(body)) = open(bytes) {
            let head = Frame::split(bytes.to_vec().into());
            assert_eq!(Frame::new(&key, body, head.expires(), Check::Blake3).to_bytes(), bytes);
        }
        let whole = Frame::new(&key, bytes.to_vec().into(), None, Check::Blake3).to_bytes();
        assert_eq!(open(&whole), Ok(Opened::Block(bytes.to_vec().into())));
    });
    let real = Frame::new(&key, vec![7; 300].into(), None, Check::Blake3).to_bytes();
    for seed in 0..2_000 {
        let bytes = changed(&real, seed);
        assert!(bytes == real[..] || open(&bytes).is_err(), "seed {seed}");
    }
}
