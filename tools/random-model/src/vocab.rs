//! A byte-level vocabulary that reads and writes any text, filled up with tokens that no text has: a model needs as
//! many tokens as it has rows.
pub const BOS: u32 = 0;
pub const EOS: u32 = 1;
pub const CONTROL: [&str; 2] = ["<s>", "</s>"];
/// llama.cpp wants a list of merges, and an empty list has no type in GGUF.
pub const MERGE: (&str, &str) = ("t", "h");

/// GPT-2's: a byte that is a visible character stands for itself, the others follow after 255.
fn byte_symbols() -> impl Iterator<Item = char> {
    let visible = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 256;
    (0u32..256).map(move |b| {
        let code = if visible(b) {
            b
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
    })
}

/// `size` different texts; the caller has checked that there are enough for the bytes.
pub fn tokens(size: usize) -> Vec<String> {
    let mut all: Vec<String> = CONTROL.map(String::from).into();
    all.extend(byte_symbols().map(String::from));
    all.push([MERGE.0, MERGE.1].concat());
    all.extend((all.len()..size).map(|id| format!("[{id}]")));
    all
}
