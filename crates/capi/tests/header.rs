//! `include/kvist.h` is checked in, so that C programs need no cbindgen. Is it that of the sources?
use std::path::Path;

#[test]
fn the_header_is_that_of_the_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let made = cbindgen::Builder::new()
        .with_crate(folder)
        .with_config(cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap())
        .generate()
        .unwrap();
    let mut text = Vec::new();
    made.write(&mut text);
    let text = String::from_utf8(text).unwrap();
    let path = folder.join("include/kvist.h");
    if std::env::var_os("KVIST_RENEW").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == text, "include/kvist.h is not that of the sources: KVIST_RENEW=1 just c");
}
