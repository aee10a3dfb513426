//! The program itself; all of it is in the library, so that other programs can carry it too.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(kvist_cli::main(std::env::args_os()))
}
