//! Runs the examples, which check their own results with assertions.

#[path = "../../examples/agent_fork.rs"]
mod agent_fork;
#[path = "../../examples/batched_sequences.rs"]
mod batched_sequences;
#[path = "../../examples/continuous_admission.rs"]
mod continuous_admission;
#[path = "../../examples/rollback_and_window.rs"]
mod rollback_and_window;
#[path = "../../examples/single_decode.rs"]
mod single_decode;
#[path = "../../examples/speculative_decoding.rs"]
mod speculative_decoding;

macro_rules! tests {
    ($($name:ident),*) => {
        $(#[test]
        fn $name() {
            $name::main().unwrap();
        })*
        const LISTED: &[&str] = &[$(stringify!($name)),*];
    };
}
tests!(
    agent_fork,
    batched_sequences,
    continuous_admission,
    rollback_and_window,
    single_decode,
    speculative_decoding
);

#[test]
fn none_is_forgotten_and_none_is_long() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let lines = std::fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines < 80, "{}: {lines} lines are too many to be read at once", path.display());
        found.push(path.file_stem().unwrap().to_string_lossy().into_owned());
    }
    found.sort_unstable();
    assert_eq!(found, LISTED);
}
