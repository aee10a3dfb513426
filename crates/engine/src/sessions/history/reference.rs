//! Tests message positions against a naive reference model, which renders the conversation up to every message
//! and tokenizes every prefix of the text. Uses templates and tokenizers like those of real models, and random
//! conversations.
use super::boundaries::BoundaryFinder;
use super::*;
use kvist_model::template::{ChatTemplate, Conversation};
use kvist_model::tokenizer::{Ends, Tokenizer};
use kvist_model::weights::Gguf;
use std::cell::Cell;
use std::path::{Path, PathBuf};

/// Counts the calls and bytes of the functions it implements.
struct Counting<'a> {
    /// `None`: the plain template.
    template: Option<&'a ChatTemplate>,
    tokenizer: &'a Tokenizer,
    room: usize,
    renders: Cell<usize>,
    rendered_bytes: Cell<usize>,
    encoded_bytes: Cell<usize>,
}

impl<'a> Counting<'a> {
    fn new(template: Option<&'a ChatTemplate>, tokenizer: &'a Tokenizer) -> Self {
        let (renders, rendered_bytes, encoded_bytes) = Default::default();
        Counting { template, tokenizer, room: usize::MAX, renders, rendered_bytes, encoded_bytes }
    }
}

impl HistoryTokenizer for Counting<'_> {
    type Error = SessionError;

    fn render(
        &self,
        messages: &[Value],
        kwargs: &Map<String, Value>,
        answer: bool,
    ) -> Result<String, SessionError> {
        let text = match self.template {
            Some(template) => {
                let conversation =
                    Conversation { messages, tools: &[], add_generation_prompt: answer, kwargs };
                let text = template.render_conversation(&conversation, self.tokenizer);
                text.map_err(|e| SessionError::invalid("messages", e.to_string()))?
            }
            None => {
                let spoken = |m: &Value| {
                    format!(
                        "{}: {}\n",
                        m["role"].as_str().unwrap(),
                        m["content"].as_str().unwrap_or_default()
                    )
                };
                let mut text: String = messages.iter().map(spoken).collect();
                text += if answer { "assistant:" } else { "" };
                text
            }
        };
        self.renders.set(self.renders.get() + 1);
        self.rendered_bytes.set(self.rendered_bytes.get() + text.len());
        Ok(text)
    }
    fn encode_rendered(&self, text: &str, first: bool) -> Result<Ends, SessionError> {
        self.encoded_bytes.set(self.encoded_bytes.get() + text.len());
        Ok(self.tokenizer.encode_with_ends(text, first && self.template.is_none()).unwrap())
    }
    fn encode(&self, text: &str, first: bool) -> Result<Vec<u32>, SessionError> {
        Ok(self.tokenizer.encode(text, first).unwrap())
    }
    fn decode(&self, tokens: &[u32]) -> Result<String, SessionError> {
        Ok(self.tokenizer.decode(tokens).unwrap())
    }
    fn content(&self, answer: &str) -> String {
        answer.into()
    }
    fn max_tokens(&self) -> usize {
        self.room
    }
}

/// Naive version of the byte positions: renders the conversation up to each message.
fn naive_bytes(tokenizer: &Counting, bodies: &[Value], text: &str, answer: bool) -> Vec<Option<usize>> {
    let mut last = 0;
    let place = |at: usize| {
        let before = match at {
            0 => Some(String::new()),
            _ => tokenizer.render(&bodies[..at], &Map::new(), false).ok(),
        };
        let place = before.filter(|b| text.starts_with(b.as_str()) && b.len() >= last).map(|b| b.len());
        last = place.unwrap_or(last);
        place
    };
    (0..bodies.len() + usize::from(answer)).map(place).collect()
}

/// Naive version of the token positions. If the parts between the cuts, tokenized separately, have the same
/// tokens as the whole text, the positions are those of the parts. Otherwise a position is the length of the
/// common prefix of the tokens of the text before the cut and the tokens of the whole text.
fn naive_tokens(tokenizer: &Counting, text: &str, cuts: &[usize]) -> Vec<usize> {
    let encode = |part: &str, first: bool| tokenizer.encode_rendered(part, first).unwrap().tokens;
    let whole = encode(text, true);
    let (mut parts, mut at, mut from) = (Vec::new(), Vec::new(), 0);
    for &cut in cuts {
        if cut > from {
            parts.extend(encode(&text[from..cut], from == 0));
        }
        at.push(parts.len());
        from = cut;
    }
    if from < text.len() {
        parts.extend(encode(&text[from..], from == 0));
    }
    if parts == whole {
        return at;
    }
    let common = |cut: &usize| match *cut {
        0 => 0,
        cut => encode(&text[..cut], true).iter().zip(&whole).take_while(|(a, b)| a == b).count(),
    };
    cuts.iter().map(common).collect()
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures")
}

fn tokenizers() -> Vec<(String, Tokenizer)> {
    let read = |name: &str| {
        let path = fixtures().join("tokenizers").join(name).join("model.gguf");
        let gguf = Gguf::from_bytes(name, std::fs::read(path).unwrap()).unwrap();
        (name.to_string(), Tokenizer::from_gguf(&gguf).unwrap().unwrap())
    };
    ["bpe-gpt-2", "bpe-llama-bpe", "bpe-qwen2", "bpe-smollm", "spm"].map(read).into()
}

const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
     {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const INST: &str = "{{ '<s>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content | trim + '</s>' }}\
     {% else %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}{% endif %}{% endfor %}";
/// Removes reasoning from earlier assistant messages, and ends the last message differently.
const FORGETS: &str = "{% for m in messages %}{% set c = m.content %}\
     {% if m.role == 'assistant' and '</think>' in c and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}\
     {{ '<' + m.role + '>' + c }}{% if not loop.last or m.role != 'tool' %}{{ '<end>\n' }}{% endif %}{% endfor %}\
     {% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}";
/// Writes the first message twice and all contents in capitals.
const ODD: &str = "{{ messages[0].content }}{% for m in messages %}{{ m.role + ': ' + m.content | upper + '\n' }}{% endfor %}";

fn templates() -> Vec<(String, Option<ChatTemplate>)> {
    let file = |name: &str| {
        let source = std::fs::read_to_string(fixtures().join(format!("templates/{name}.jinja"))).unwrap();
        (name.to_string(), Some(ChatTemplate::new(name, &source).unwrap()))
    };
    let inline =
        |(name, source): (&str, &str)| (name.to_string(), Some(ChatTemplate::new(name, source).unwrap()));
    let mut all: Vec<_> = ["llama", "qwen", "hermes", "deepseek"].map(file).into();
    all.extend([("chatml", CHATML), ("inst", INST), ("forgets", FORGETS), ("odd", ODD)].map(inline));
    all.push(("plain".into(), None));
    all
}

struct Draw(u64);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }
}

const WORDS: [&str; 14] = [
    "a",
    "the",
    " ",
    "\n",
    "user",
    "é",
    "日本",
    "🙂",
    "<|im_end|>",
    "</s>",
    "</think>",
    "assistant:",
    "12345",
    "  ",
];

/// Messages whose roles alternate, or are random.
fn conversation(draw: &mut Draw, n: usize) -> Vec<Value> {
    let (wild, odd) = (draw.below(3) == 0, draw.below(3) == 0);
    let one = |at: usize| {
        let role = match (at, wild) {
            (0, _) if odd => "system",
            (_, true) => draw.one(&["user", "assistant", "tool", "user"]),
            _ => ["user", "assistant"][(at + usize::from(odd)) % 2],
        };
        let n = match wild {
            true => draw.below(6),
            false => 1 + draw.below(6),
        };
        let words: Vec<&str> = (0..n).map(|_| WORDS[draw.below(if wild { 14 } else { 8 })]).collect();
        json!({"role": role, "content": words.join(if wild { "" } else { " " })})
    };
    (0..n).map(one).collect()
}

#[test]
fn places_and_the_naive_way_to_find_them() {
    let (tokenizers, templates) = (tokenizers(), templates());
    let mut draw = Draw(7);
    let (mut there, mut missed, mut places) = (0, 0, 0);
    for (name, template) in &templates {
        let mut of_tame = (0, 0);
        for round in 0..150 {
            let (tokens_of, tokenizer) = &tokenizers[round % tokenizers.len()];
            let tokenizer = Counting::new(template.as_ref(), tokenizer);
            let n = [1, 2, 5, 15, 16, 17, 40][draw.below(7)];
            let bodies = conversation(&mut draw, n);
            let answer = draw.below(2) == 0;
            let what = format!("{name}, {tokens_of}, round {round}, {n} messages, {}", json!(bodies));
            let Ok(text) = tokenizer.render(&bodies, &Map::new(), answer) else { continue };
            let expected = naive_bytes(&tokenizer, &bodies, &text, answer);
            let finder = BoundaryFinder {
                tokenizer: &tokenizer,
                bodies: &bodies,
                kwargs: &Map::new(),
                answer,
                text: &text,
            };
            let found = finder.begins(0..expected.len(), 0);
            if expected.len() <= boundaries::MAX_PREFIXES {
                assert_eq!(found, expected, "{what}");
            }
            // Alternating roles with non-empty contents. With three roles there are more kinds of pairs than
            // the limit permits.
            let is_tame = |m: &Value| {
                m["role"] != "tool" && m["content"].as_str().unwrap().contains(|c: char| !c.is_whitespace())
            };
            let tame = bodies.iter().all(is_tame);
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!(found.is_none() || found == expected, "{found:?} at {at}, {expected:?}: {what}");
                there += usize::from(expected.is_some());
                missed += usize::from(expected.is_some() && found.is_none());
                if tame {
                    of_tame.0 += usize::from(expected.is_some());
                    of_tame.1 += usize::from(found.is_some());
                }
            }
            let cuts: Vec<usize> = expected.iter().flatten().copied().collect();
            let ends = tokenizer.encode_rendered(&text, true).unwrap();
            let slowly = naive_tokens(&tokenizer, &text, &cuts);
            let quickly = ends.before(cuts.iter().copied());
            for ((cut, quickly), slowly) in cuts.iter().zip(quickly).zip(slowly) {
                places += 1;
                if quickly != slowly {
                    // A token spans the cut. The common prefix then depends on the tokenization of the text
                    // before the cut; the last token that lies completely before the cut is just as good.
                    let before = tokenizer.encode_rendered(&text[..*cut], true).unwrap().tokens;
                    assert!(!ends.tokens.starts_with(&before), "{quickly}, {slowly} at byte {cut}: {what}");
                    assert!(slowly < quickly, "{quickly}, {slowly} at byte {cut}: {what}");
                    assert!(ends.ends[quickly - 1] <= *cut && ends.ends[quickly] > *cut, "{what}");
                }
            }
        }
        // All positions that can be found are found.
        let (there, found) = of_tame;
        println!("{name}: {found} of {there}");
        if name != "odd" {
            assert!(there > 200 && found == there, "{name}: {found} of {there}");
        }
    }
    assert!(places > 2000 && missed * 5 < there, "{missed} of {there} missed, {places} in tokens");
}

/// Counts work: the number of renderings does not grow with the number of messages, and every byte is tokenized
/// once.
#[test]
fn placing_takes_time_by_the_length() {
    let (tokenizers, templates) = (tokenizers(), templates());
    for (name, template) in templates.iter().filter(|(name, _)| name != "odd") {
        for (_, tokenizer) in &tokenizers {
            for n in [40, 256] {
                let counting = Counting::new(template.as_ref(), tokenizer);
                let role = |at: usize| ["user", "assistant"][at % 2];
                let spoken: Vec<Value> = (0..n)
                    .map(|at| json!({"role": role(at), "content": format!("number {at} says so")}))
                    .collect();
                let empty = History::of_messages(Map::new());
                let history = empty.with_messages(&counting, &spoken).unwrap();
                let Some(there) = &history.rendered else { panic!("made of messages") };
                let length = there.text.len();
                assert_eq!(counting.encoded_bytes.get(), length, "{name}: each byte is tokenized once");
                let (renders, bytes) = (counting.renders.get(), counting.rendered_bytes.get());
                assert!(
                    renders <= boundaries::MAX_PREFIXES + 2,
                    "{name}: {renders} renderings of {n} messages"
                );
                assert!(bytes <= renders * (length + 5 * n), "{name}: {bytes} bytes of {length}");
                let placed = there.messages.iter().filter(|m| m.begins.is_some()).count();
                assert_eq!(placed, n, "{name}: all have their place");
                // A conversation that does not fit is rejected before its messages are located.
                let narrow = Counting { room: 100, ..Counting::new(template.as_ref(), tokenizer) };
                let refused = empty.with_messages(&narrow, &spoken).map(|_| ()).unwrap_err();
                assert!(matches!(refused, SessionError::TooLong { .. }), "{name}: {refused}");
                assert_eq!((narrow.renders.get(), narrow.encoded_bytes.get()), (1, length), "{name}");
            }
        }
    }
}

/// Removes a stop string from answers in several scripts. The tokens before it stay as they were sampled; a
/// linear search over the number of tokens gives the same result.
#[test]
fn answers_are_shortened_and_not_cut_anew() {
    let mut draw = Draw(3);
    let mut compared = 0;
    for (name, tokenizer) in tokenizers() {
        let tokenizer = Counting::new(None, &tokenizer);
        for round in 0..200 {
            let prompt = tokenizer.encode("A prompt: ", true).unwrap();
            let words: String = (0..1 + draw.below(12))
                .map(|_| draw.one(&["日本", "🙂", "é", " the", "a", "한국", " "]))
                .collect();
            let mut tokens = prompt.clone();
            tokens.extend(tokenizer.encode(&words, false).unwrap());
            let from = prompt.len();
            // Decode after the prompt, because the text may depend on it.
            let before = tokenizer.decode(&prompt).unwrap();
            let spoken = |to: usize| match tokenizer.decode(&tokens[..to]).unwrap().strip_prefix(&before) {
                Some(spoken) => spoken.to_owned(),
                None => tokenizer.decode(&tokens[from..to]).unwrap(),
            };
            let answer = spoken(tokens.len());
            let ends: Vec<usize> = answer.char_indices().map(|(at, _)| at).collect();
            let Some(stop) = ends.get(draw.below(ends.len().max(1))) else { continue };
            let text = &answer[..*stop];
            let slowly = (from..=tokens.len()).rfind(|to| text.starts_with(&spoken(*to))).unwrap();
            let mut history = History::of_tokens(tokens.clone());
            history.end_answer(&tokenizer, from, false, Some(text)).unwrap();
            let what = format!("{name}, round {round}: {answer:?} up to {text:?}");
            assert_eq!(history.tokens[..slowly], tokens[..slowly], "{what}");
            let whole = spoken(slowly) == text;
            assert!(!whole || history.tokens.len() == slowly, "{what}");
            compared += 1;
        }
    }
    assert!(compared > 900, "{compared}");
}
