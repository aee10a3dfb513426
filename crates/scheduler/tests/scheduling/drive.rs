//! The simple driver and its clock: arrival times and callbacks. Until now only other crates tested them.

use crate::common::{cells, machine};
use kvist_scheduler::*;

fn scheduler() -> Scheduler {
    Scheduler::new(Config { max_batch: 1, ..Config::default() }, cells(100), None).unwrap()
}

#[test]
fn every_request_is_served_and_reported_once() {
    let mut clock = VirtualClock(5);
    let mut ended = Vec::new();
    // The second request waits for the first, and nothing happens before the third arrives.
    let arrivals = [Request::new(0, 0, 4, 3), Request::new(1, 7, 4, 1), Request::new(2, 100, 4, 2)];
    drive(&mut scheduler(), &mut machine(10), &mut clock, arrivals, |e| ended.push(e)).unwrap();
    let told: Vec<_> = ended.iter().map(|e| (e.id.0, e.admitted_ns, e.ended_ns)).collect();
    assert_eq!(told, [(0, Some(5), 35), (1, Some(35), 45), (2, Some(100), 120)]);
    assert_eq!(clock, VirtualClock(120));

    let twice = [Request::new(0, 0, 4, 3), Request::new(0, 1, 4, 3)];
    let refused = drive(&mut scheduler(), &mut machine(10), &mut VirtualClock(0), twice, |_| ());
    assert_eq!(refused, Err(Duplicate(RequestId(0))));
}

#[test]
fn a_virtual_clock_goes_where_it_is_told_and_never_back() {
    let mut clock = VirtualClock(3);
    clock.advance(4);
    assert_eq!(clock.now_ns(), 7);
    clock.sleep_until(20);
    assert_eq!(clock.now_ns(), 20);
    clock.sleep_until(5);
    clock.advance(u64::MAX);
    assert_eq!(clock.now_ns(), u64::MAX);
}
