//! The reference backend passes the conformance suite, with almost no tolerance.
use kvist_device::Storage;
use kvist_device::reference::Reference;
use kvist_testing::conformance::{self, Ends, Options};

#[test]
fn the_reference_conforms() {
    // f64 sums rounded once to f32: half a unit in the last place of an output. It stores f32 whatever storage is
    // requested, so two of them are enough. It is slow: a third of the cases.
    let storages = |storage| [Storage::F32, Storage::Q8].contains(&storage);
    let options = Options { attention: 1e-8, exact_rows: true, storages, one_in: 3, ..Options::from_env() };
    match conformance::run(&Reference, &options) {
        Ok(report) => println!("{report}"),
        Err(table) => panic!("{table}"),
    }
}

#[test]
fn the_reference_transfers() {
    let ends = Ends { from: &Reference, to: &Reference, same_bits: true };
    let done = conformance::transfers(ends, &Options { one_in: 3, ..Options::from_env() });
    done.unwrap_or_else(|table| panic!("{table}"));
}

#[test]
fn the_reference_refuses() {
    conformance::refusals(&Reference).unwrap_or_else(|table| panic!("{table}"));
}
