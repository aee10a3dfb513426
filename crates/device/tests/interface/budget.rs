//! A budget refuses before any memory is allocated, and its usage returns to zero.
use kvist_device::*;

#[test]
fn it_refuses_what_does_not_fit_and_changes_nothing() {
    let budget = MemoryBudget::new(1_000);
    let weights = budget.reserve(Purpose::Weights, 600).unwrap();
    let refused = budget.reserve(Purpose::KvCache, 401).unwrap_err();
    assert_eq!(refused, OutOfBudget { purpose: Purpose::KvCache, asked: 401, free: 400, total: 1_000 });
    assert_eq!(refused.to_string(), "401 B for the KV cache do not fit: 400 B of 1000 B are free");
    assert_eq!((budget.usage().total(), budget.free()), (600, 400));
    let kv = budget.reserve(Purpose::KvCache, 400).unwrap(); // up to the last byte
    assert_eq!(budget.free(), 0);
    assert!(budget.reserve(Purpose::Scratch, 1).is_err());
    let nothing = budget.reserve(Purpose::Scratch, 0).unwrap(); // 0 bytes always fit
    assert_eq!(budget.usage().of(Purpose::Weights), 600);
    assert_eq!(budget.usage().of(Purpose::KvCache), 400);
    drop((weights, kv, nothing));
    assert_eq!(budget.usage(), Usage::default());
}

#[test]
fn a_reservation_grows_shrinks_and_gives_back() {
    let budget = MemoryBudget::new(1_000);
    let mut reservation = Reservation::empty(&budget, Purpose::KvCache);
    assert_eq!(reservation.bytes(), 0);
    reservation.grow(700).unwrap();
    assert!(reservation.grow(301).is_err());
    assert_eq!((reservation.bytes(), budget.usage().of(Purpose::KvCache)), (700, 700), "a refused growth");
    reservation.grow(300).unwrap();
    reservation.shrink(400);
    assert_eq!((reservation.bytes(), budget.free()), (600, 400));
    reservation.shrink(u64::MAX); // at most all of them
    assert_eq!((reservation.bytes(), budget.free()), (0, 1_000));
    reservation.grow(10).unwrap();
    drop(reservation);
    assert_eq!(budget.usage(), Usage::default());
}

#[test]
fn unlimited_counts_and_refuses_nothing_that_exists() {
    let budget = MemoryBudget::unlimited();
    let reservation = budget.reserve(Purpose::Activations, u64::MAX - 5).unwrap();
    assert_eq!(budget.free(), 5);
    // The sum of all reservations does not overflow.
    assert!(budget.reserve(Purpose::Weights, 6).is_err());
    drop(reservation);
    assert_eq!(budget.usage().total(), 0);
}

/// Numbers stay correct when a thread with a reservation panics: unwinding drops the guard.
#[test]
fn a_panic_gives_back() {
    let budget = MemoryBudget::new(100);
    let other = budget.clone();
    let panicked = std::thread::spawn(move || {
        let _reservation = other.reserve(Purpose::Scratch, 60).unwrap();
        panic!("a test wants this panic");
    });
    assert!(panicked.join().is_err());
    assert_eq!(budget.usage(), Usage::default());
    assert!(budget.reserve(Purpose::Scratch, 100).is_ok());
}

#[test]
fn threads_never_get_more_than_there_is() {
    let budget = MemoryBudget::new(64);
    let turns = |_| {
        let budget = budget.clone();
        std::thread::spawn(move || {
            for i in 0..2_000 {
                let reservation = budget.reserve(Purpose::KvCache, i % 20);
                assert!(budget.usage().total() <= 64);
                drop(reservation);
            }
        })
    };
    let threads: Vec<_> = (0..4).map(turns).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(budget.usage(), Usage::default());
}

/// Promised bytes are unavailable to others, whether or not they have been reserved yet.
#[test]
fn a_promise_is_kept_and_given_back() {
    let budget = MemoryBudget::new(1_000);
    let bound = Usage::default().with(Purpose::KvCache, 500).with(Purpose::Scratch, 100);
    let first = budget.promise(&bound).unwrap();
    assert_eq!((budget.free(), budget.usage().total(), first.total(), first.free()), (400, 0, 600, 600));
    let refused = budget.promise(&bound).unwrap_err();
    assert_eq!(refused, OutOfBudget { purpose: Purpose::KvCache, asked: 600, free: 400, total: 1_000 });
    let other = budget.reserve(Purpose::Weights, 400).unwrap();
    assert!(budget.reserve(Purpose::Weights, 1).is_err());

    let mut kv = first.reserve(Purpose::KvCache, 450).unwrap();
    assert_eq!((first.free(), budget.free()), (150, 0), "drawing a promise takes nothing more");
    assert_eq!((budget.usage().of(Purpose::KvCache), first.usage().total()), (450, 450));
    assert!(kv.grow(151).is_err(), "no more than was promised");
    // A sub-budget can have sub-budgets.
    let part = first.promise(&Usage::default().with(Purpose::Scratch, 100)).unwrap();
    let scratch = part.reserve(Purpose::Scratch, 70).unwrap();
    assert_eq!((part.free(), first.free(), budget.free()), (30, 50, 0));
    assert_eq!((budget.usage().of(Purpose::Scratch), first.usage().of(Purpose::Scratch)), (70, 70));
    drop(part); // the reservation from it still counts
    assert_eq!(first.free(), 50);
    drop(scratch);
    assert_eq!((first.free(), budget.usage().of(Purpose::Scratch)), (150, 0));
    kv.shrink(50);
    assert_eq!((first.free(), budget.free(), budget.usage().of(Purpose::KvCache)), (200, 0, 400));
    drop((first, kv));
    assert_eq!((budget.free(), budget.usage().total()), (600, 400));
    drop(other);
    assert_eq!((budget.free(), budget.usage()), (1_000, Usage::default()));
}

#[test]
fn sums_that_overflow_are_never_small() {
    let usage = Usage::default().with(Purpose::Weights, u64::MAX).with(Purpose::KvCache, 5);
    assert_eq!((usage.total(), usage.checked_total()), (u64::MAX, None));
    assert!(MemoryBudget::new(u64::MAX - 1).promise(&usage).is_err());
    assert_eq!(usage.with(Purpose::KvCache, 0).checked_total(), Some(u64::MAX));
}

#[test]
fn usage_is_by_purpose() {
    let mut usage = Usage::default();
    for (i, purpose) in Purpose::ALL.into_iter().enumerate() {
        usage = usage.with(purpose, 10 << i);
    }
    assert_eq!(usage.total(), 150);
    assert_eq!(Purpose::ALL.map(|purpose| usage.of(purpose)), [10, 20, 40, 80]);
    assert_eq!(usage.with(Purpose::Weights, 1).total(), 141, "`with` replaces");
    let names = Purpose::ALL.map(Purpose::name);
    assert_eq!(names, ["weights", "KV cache", "scratch", "activations"]);
}

#[test]
fn bytes_are_shown_for_people() {
    let cases = [
        (0, "0 B"),
        (1, "1 B"),
        (1_023, "1023 B"),
        (1_024, "1 KiB"),
        (1_536, "1.50 KiB"),
        (512 << 10, "512 KiB"),
        (1 << 30, "1 GiB"),
        (3 << 29, "1.50 GiB"),
        (1 << 40, "1 TiB"),
        (5_000 << 40, "5000 TiB"),
        (u64::MAX, "unlimited"),
    ];
    let shown = cases.map(|(bytes, _)| Bytes(bytes).to_string());
    assert_eq!(shown, cases.map(|(_, text)| text.to_string()));
}
