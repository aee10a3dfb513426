//! The CPU backend against the suite, and what the suite does not know to ask.
use kvist_backend::conformance::{self, Options};
use kvist_cpu::Cpu;

#[test]
fn cpu_conforms() {
    match conformance::run(&Cpu::default(), &Options::from_env()) {
        Ok(report) => println!("{report}"),
        Err(table) => panic!("{table}"),
    }
}
