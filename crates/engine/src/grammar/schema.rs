//! Validates a JSON schema of a request before it is compiled.
//!
//! Each of the following is rejected with its path: what is not a schema; standard keywords that cannot be
//! enforced (`not`, `if`, `uniqueItems`, …), because an answer that ignores them would be invalid; numbers that
//! would be enforced as others ([`exact`]); references to other documents, anchors or missing definitions; `oneOf`
//! whose alternatives may overlap, or would take too long to tell apart ([`disjoint`]); schemas that are too large
//! or nested too deeply. Keywords unknown to JSON Schema are annotations, as its specification says. Properties are
//! generated in the order of the schema.
use super::InvalidParameter;
use super::disjoint::disjoint;
use super::exact;
use kvist_model::halt;
use serde_json::{Map, Value, json};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

/// Maximum size of one schema as compact JSON, in bytes.
pub(super) const MAX_SCHEMA_BYTES: usize = 64 << 10;
/// Maximum nesting of objects and lists.
const MAX_DEPTH: usize = 64;
/// Whitespace allowed between two JSON tokens of an answer: a space, or a line break with an indentation of up
/// to 24 spaces or 8 tabs. Pretty-printed JSON fits, and a model that tends to repeat whitespace cannot
/// continue for long.
const BLANKS: &str = r"\x20|\x0D?\x0A(\x20{0,24}|\x09{0,8})";

/// A schema and its path in the request.
#[derive(Clone, Debug, PartialEq)]
pub struct Schema {
    place: String,
    schema: Value,
}

impl Schema {
    /// `place` is the schema's path in error messages. Nothing is validated yet.
    pub fn new(place: &str, mut schema: Value) -> Self {
        exact::count_in_integers(&mut schema);
        Schema { place: place.into(), schema }
    }

    pub(crate) fn place(&self) -> &str {
        &self.place
    }
    pub(crate) fn value(&self) -> &Value {
        &self.schema
    }

    /// Validates the schema and returns it as JSON for llguidance. Proofs consume `proof_steps`, which all
    /// schemas of a request share.
    pub(crate) fn checked(&self, proof_steps: &mut usize) -> Result<String, InvalidParameter> {
        // Check the depth first, because everything else recurses through the value.
        let bad = |problem: String| Err(InvalidParameter::new(&self.place, problem));
        if depth_exceeds(&self.schema, MAX_DEPTH) {
            return bad(format!("is nested deeper than {MAX_DEPTH} levels"));
        }
        let bytes = self.schema.to_string().len();
        if bytes > MAX_SCHEMA_BYTES {
            return bad(format!("has {bytes} bytes; at most {MAX_SCHEMA_BYTES} are allowed"));
        }
        let max_steps = (bytes * STEPS_PER_BYTE).min(*proof_steps);
        let checker = Checker {
            root: &self.schema,
            root_place: &self.place,
            max_steps,
            steps: Cell::new(max_steps),
            seen: RefCell::default(),
            targets: RefCell::default(),
        };
        let checked = checker.all();
        *proof_steps -= max_steps - checker.steps.get();
        checked?;
        let mut schema = match &self.schema {
            Value::Object(map) => map.clone(),
            Value::Bool(true) => Map::new(),
            _ => return bad("admits nothing".into()),
        };
        // Options of llguidance; they replace any value of this name in the request. `coerce_one_of` treats
        // `oneOf` as `anyOf`, which is the same here because no two alternatives overlap.
        let options = json!({"whitespace_pattern": BLANKS, "coerce_one_of": true});
        schema.insert("x-guidance".into(), options);
        Ok(Value::Object(schema).to_string())
    }
}

/// Recurses at most `limit` levels itself.
fn depth_exceeds(value: &Value, limit: usize) -> bool {
    let deeper = |value: &Value| limit == 0 || depth_exceeds(value, limit - 1);
    match value {
        Value::Array(list) => list.iter().any(deeper),
        Value::Object(map) => map.values().any(deeper),
        _ => false,
    }
}

/// Maximum number of alternatives of one `oneOf`; every pair is compared.
const MAX_ONE_OF: usize = 64;

/// Budget of all `oneOf` of a schema for telling alternatives apart, in steps per byte of schema, so that a
/// short request causes little work. A step takes far less than a microsecond.
const STEPS_PER_BYTE: usize = 16;

/// Budget of steps for all schemas of a request together, the same as for the largest schema, so that a hundred
/// tools cause no more work than one.
pub(super) const PROOF_STEPS: usize = MAX_SCHEMA_BYTES * STEPS_PER_BYTE;

/// Values of `$schema` for drafts in which `prefixItems` means nothing.
const OLDER_DRAFTS: [&str; 4] = [
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-04/schema",
];

const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

struct Checker<'s> {
    root: &'s Value,
    root_place: &'s str,
    max_steps: usize,
    /// Steps left.
    steps: Cell<usize>,
    /// The schemas that were checked, by address.
    seen: RefCell<BTreeSet<*const Value>>,
    /// What references lead to, with its place: anything of the document, also below a keyword that means nothing by itself.
    targets: RefCell<Vec<(&'s Value, String)>>,
}

impl<'s> Checker<'s> {
    fn all(&self) -> Result<(), InvalidParameter> {
        self.schema(self.root, self.root_place)?;
        loop {
            let Some((target, place)) = self.targets.borrow_mut().pop() else { return Ok(()) };
            self.schema(target, &place)?;
        }
    }

    fn schema(&self, schema: &'s Value, place: &str) -> Result<(), InvalidParameter> {
        if !self.seen.borrow_mut().insert(schema) {
            return Ok(());
        }
        let map = match schema {
            Value::Bool(_) => return Ok(()),
            Value::Object(map) => map,
            _ => return Err(InvalidParameter::new(place, "must be an object, true or false".into())),
        };
        for (keyword, value) in map {
            self.keyword(keyword, value, &format!("{place}.{keyword}"))?;
        }
        exact::check(map, place)?;
        self.prefix_items(map, place)?;
        match map.get("oneOf").and_then(Value::as_array) {
            Some(ways) => self.one_of(map, ways, place),
            None => Ok(()),
        }
    }

    /// llguidance ignores `prefixItems` beside older keywords. That is right only in older drafts, which do not know it.
    fn prefix_items(&self, map: &Map<String, Value>, place: &str) -> Result<(), InvalidParameter> {
        let has_older = map.contains_key("additionalItems") || map.get("items").is_some_and(Value::is_array);
        let draft = self.root.get("$schema").and_then(Value::as_str).unwrap_or_default();
        if !map.contains_key("prefixItems")
            || !has_older
            || OLDER_DRAFTS.contains(&draft.trim_end_matches('#'))
        {
            return Ok(());
        }
        let what = "cannot be enforced beside `additionalItems` or a list of `items`: `items` is the schema of \
                    those that follow";
        Err(InvalidParameter::new(&format!("{place}.prefixItems"), what.into()))
    }

    /// A grammar can only express "exactly one" if no two alternatives overlap.
    fn one_of(&self, map: &Map<String, Value>, ways: &[Value], place: &str) -> Result<(), InvalidParameter> {
        let bad = |problem: String| Err(InvalidParameter::new(&format!("{place}.oneOf"), problem));
        if ways.len() > MAX_ONE_OF {
            return bad(format!(
                "has {} alternatives; at most {MAX_ONE_OF} are allowed: use `anyOf`",
                ways.len()
            ));
        }
        let mut rest = map.clone();
        rest.shift_remove("oneOf");
        let rest = Value::Object(rest);
        for (i, a) in ways.iter().enumerate() {
            for (j, b) in ways.iter().enumerate().skip(i + 1) {
                if halt::check().is_err() {
                    return Err(InvalidParameter::halted(&format!("{place}.oneOf")));
                }
                if !disjoint(&[&rest, a], &[&rest, b], self.root, &self.steps) {
                    if self.steps.get() == 0 {
                        return bad(format!(
                            "cannot be enforced: telling the alternatives of this schema apart takes more than the \
                             {} steps that the request's schemas share. Give them different types, or a property with a \
                             different `const` in each that comes first in `required`, or use `anyOf`",
                            self.max_steps
                        ));
                    }
                    return bad(format!(
                        "cannot be enforced: its alternatives {i} and {j} may both accept the same value. Give them \
                         different types, or a required property with a different `const` in each, or use `anyOf`"
                    ));
                }
            }
        }
        Ok(())
    }

    fn keyword(&self, keyword: &str, value: &'s Value, place: &str) -> Result<(), InvalidParameter> {
        let bad = |problem: &str| Err(InvalidParameter::new(place, problem.into()));
        match keyword {
            "properties" | "patternProperties" | "$defs" | "definitions" => {
                let Some(map) = value.as_object() else { return bad("is not an object") };
                map.iter().try_for_each(|(name, schema)| self.schema(schema, &format!("{place}.{name}")))
            }
            "allOf" | "anyOf" | "oneOf" | "prefixItems" => {
                let Some(list) = value.as_array() else { return bad("is not a list") };
                if list.is_empty() && keyword != "prefixItems" {
                    return bad("is empty");
                }
                self.list(list, place)
            }
            "items" => match value {
                Value::Array(list) => self.list(list, place),
                schema => self.schema(schema, place),
            },
            "additionalProperties" | "additionalItems" => self.schema(value, place),
            "$ref" => self.reference(value, place),
            "type" => {
                let known = |v: &Value| v.as_str().is_some_and(|name| TYPES.contains(&name));
                match value {
                    Value::String(_) if known(value) => Ok(()),
                    Value::Array(list) if !list.is_empty() && list.iter().all(known) => Ok(()),
                    _ => bad(&format!("is {value}; expected {}", TYPES.join(", "))),
                }
            }
            "enum" => match value.as_array() {
                Some(list) if !list.is_empty() => Ok(()),
                _ => bad("is not a non-empty list"),
            },
            "required" => match value.as_array() {
                Some(list) if list.iter().all(Value::is_string) => Ok(()),
                _ => bad("is not a list of names"),
            },
            "pattern" | "format" if !value.is_string() => bad("is not a string"),
            count
                if exact::COUNTS.contains(&count)
                    && value.as_u64().is_none_or(|n| n > u64::from(u32::MAX)) =>
            {
                bad("is not a whole number from 0 to 4294967295")
            }
            "minimum" | "maximum" | "multipleOf" if !value.is_number() => bad("is not a number"),
            "exclusiveMinimum" | "exclusiveMaximum" if !value.is_number() && !value.is_boolean() => {
                bad("is not a number")
            }
            "not"
            | "if"
            | "then"
            | "else"
            | "contains"
            | "minContains"
            | "maxContains"
            | "uniqueItems"
            | "propertyNames"
            | "dependentSchemas"
            | "dependentRequired"
            | "dependencies"
            | "unevaluatedItems"
            | "unevaluatedProperties"
            | "$dynamicRef"
            | "$recursiveRef" => bad("cannot be enforced: omit it and check the answer yourself"),
            _ => Ok(()),
        }
    }

    fn list(&self, list: &'s [Value], place: &str) -> Result<(), InvalidParameter> {
        list.iter().enumerate().try_for_each(|(at, schema)| self.schema(schema, &format!("{place}[{at}]")))
    }

    /// Accepts `#`, or `#/…` to an existing schema.
    fn reference(&self, value: &Value, place: &str) -> Result<(), InvalidParameter> {
        let bad = |problem: String| Err(InvalidParameter::new(place, problem));
        let Some(to) = value.as_str() else { return bad("is not a string".into()) };
        if to == "#" {
            return Ok(());
        }
        let Some(path) = to.strip_prefix("#/") else {
            return bad(format!("is `{to}`; kvist follows only references inside the schema, `#/$defs/…`"));
        };
        if path.contains(['~', '%']) {
            return bad(format!(
                "is `{to}`; references with escapes are not supported: rename the definition"
            ));
        }
        let found = self.root.pointer(&format!("/{path}"));
        match found {
            Some(target @ (Value::Object(_) | Value::Bool(_))) => {
                let place = format!("{}.{}", self.root_place, path.replace('/', "."));
                self.targets.borrow_mut().push((target, place));
                Ok(())
            }
            Some(_) => bad(format!("is `{to}`, which is not a schema")),
            None => bad(format!("is `{to}`, which does not exist")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Validates a schema as the only one of its request.
    fn checked(schema: &Schema) -> Result<String, InvalidParameter> {
        let mut proof_steps = PROOF_STEPS;
        schema.checked(&mut proof_steps)
    }

    #[test]
    fn bad_schemas_are_refused_by_path() {
        let mut deep = json!({"type": "string"});
        for _ in 0..40 {
            deep = json!({"type": "array", "items": {"anyOf": [deep]}});
        }
        for (schema, place) in [
            (json!(1), "`s` must be an object"),
            (json!(false), "`s` admits nothing"),
            (json!({"type": "text"}), "`s.type` is \"text\""),
            (json!({"type": []}), "`s.type`"),
            (
                json!({"properties": {"a": {"type": "array", "items": {"type": 1}}}}),
                "`s.properties.a.items.type`",
            ),
            (json!({"properties": []}), "`s.properties` is not an object"),
            (json!({"anyOf": [{}, {"not": {}}]}), "`s.anyOf[1].not` cannot be enforced"),
            (json!({"anyOf": []}), "`s.anyOf` is empty"),
            (json!({"$defs": {"x": {"uniqueItems": true}}}), "`s.$defs.x.uniqueItems`"),
            (json!({"enum": []}), "`s.enum`"),
            (json!({"required": [1]}), "`s.required`"),
            (
                json!({"items": {"$ref": "#/$defs/none"}}),
                "`s.items.$ref` is `#/$defs/none`, which does not exist",
            ),
            (json!({"$ref": "https://example.com/s.json"}), "`s.$ref` is `https"),
            (json!({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {}}}), "`s.$ref`"),
            (json!({"$ref": "#/enum", "enum": [1]}), "which is not a schema"),
            (json!({"$ref": 1}), "`s.$ref` is not a string"),
            // Regression: what references lead to was only checked where schemas are expected.
            (json!({"$ref": "#/x/y", "x": {"y": {"items": {"not": {}}}}}), "`s.x.y.items.not`"),
            (json!({"items": {"$ref": "#/x"}, "x": {"$ref": "#/y"}, "y": {"type": 1}}), "`s.y.type`"),
            (json!({"maxLength": -1}), "`s.maxLength`"),
            (json!({"minItems": 1e30}), "`s.minItems`"),
            (json!({"minimum": "1"}), "`s.minimum`"),
            (json!({"pattern": 1}), "`s.pattern`"),
            (json!({"description": "x".repeat(MAX_SCHEMA_BYTES)}), "bytes;"),
            (deep, "nested deeper"),
        ] {
            let error = checked(&Schema::new("s", schema.clone())).unwrap_err().to_string();
            assert!(error.contains(place), "{schema}: {error}");
        }
    }

    /// Regression: integers were enforced as the nearest `f64`, 9007199254740993 as 9007199254740992.
    #[test]
    fn numbers_are_enforced_as_written_or_refused() {
        const ODD: i64 = (1 << 53) + 1;
        for (schema, place) in [
            (json!({"const": ODD}), "`s.const` is 9007199254740993, which cannot be enforced exactly"),
            (json!({"const": -ODD}), "`s.const` is -9007199254740993"),
            (json!({"enum": [1, u64::MAX]}), "`s.enum[1]` is 18446744073709551615"),
            (json!({"properties": {"a": {"const": {"b": ["c", ODD]}}}}), "`s.properties.a.const.b[1]`"),
            (json!({"const": i64::MIN}), "`s.const`"),
            (json!({"const": 1_u64 << 63}), "`s.const`"),
            (json!({"const": 1e20}), "`s.const`"),
            (json!({"minimum": ODD}), "`s.minimum`"),
            (json!({"minimum": i64::MAX}), "`s.minimum`"),
            (json!({"minimum": i64::MIN}), "`s.minimum`"),
            (json!({"minimum": 1e19}), "`s.minimum`"),
            (json!({"maximum": ODD}), "`s.maximum`"),
            (json!({"maximum": -1e30}), "`s.maximum`"),
            (json!({"exclusiveMinimum": ODD - 1}), "`s.exclusiveMinimum`"),
            (json!({"exclusiveMaximum": 1_i64 << 60}), "`s.exclusiveMaximum`"),
            (json!({"exclusiveMaximum": i64::MAX}), "`s.exclusiveMaximum`"),
            (json!({"minimum": ODD - 1, "exclusiveMinimum": true}), "`s.minimum`"),
            (json!({"maximum": ODD - 1, "exclusiveMaximum": true}), "`s.maximum`"),
            (json!({"multipleOf": ODD}), "`s.multipleOf`"),
        ] {
            let error = checked(&Schema::new("s", schema.clone())).unwrap_err().to_string();
            assert!(error.contains(place), "{schema}: {error}");
        }
        for schema in [
            json!({"enum": [ODD - 1, ODD + 1, ODD - 2, 2 - ODD, 1_i64 << 62, 0.1, 1e18, -0.5, "9007199254740993"]}),
            json!({"minimum": 1 - ODD, "maximum": ODD - 1}),
            json!({"exclusiveMinimum": 2 - ODD, "exclusiveMaximum": ODD - 2}),
            json!({"minimum": 0, "maximum": i64::MAX}),
            json!({"maximum": u64::MAX}),
            json!({"exclusiveMaximum": 1_u64 << 63}),
            json!({"default": ODD, "examples": [ODD]}),
        ] {
            checked(&Schema::new("s", schema.clone())).unwrap_or_else(|e| panic!("{schema}: {e}"));
        }
    }

    /// Regression: llguidance ignored the `prefixItems` of these.
    #[test]
    fn prefix_items_beside_older_keywords_are_refused() {
        let draft = |draft: &str, with: Value| {
            let list = json!({"prefixItems": [{"type": "string"}], "items": with, "additionalItems": false});
            json!({"$schema": draft, "properties": {"a": list}})
        };
        for (schema, place) in [
            (json!({"prefixItems": [{}], "additionalItems": false}), "`s.prefixItems` cannot be enforced"),
            (json!({"prefixItems": [{}], "items": [{}]}), "`s.prefixItems`"),
            (
                draft("https://json-schema.org/draft/2020-12/schema", json!({})),
                "`s.properties.a.prefixItems`",
            ),
        ] {
            let error = checked(&Schema::new("s", schema.clone())).unwrap_err().to_string();
            assert!(error.contains(place), "{schema}: {error}");
        }
        for schema in [
            json!({"prefixItems": [{}], "items": false}),
            json!({"items": [{}], "additionalItems": false}),
            draft("http://json-schema.org/draft-07/schema#", json!([{"type": "integer"}])),
            draft("https://json-schema.org/draft/2019-09/schema", json!({})),
        ] {
            checked(&Schema::new("s", schema.clone())).unwrap_or_else(|e| panic!("{schema}: {e}"));
        }
    }

    #[test]
    fn a_request_does_not_set_the_compilers_options() {
        let schema = json!({"type": "object", "x-guidance": {"lenient": true}, "title": "T"});
        let text = checked(&Schema::new("s", schema)).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["x-guidance"]["lenient"], json!(null));
        assert_eq!(value["x-guidance"]["coerce_one_of"], json!(true));
    }

    /// Regression: `oneOf` was silently treated as `anyOf`, which also admits values of two alternatives.
    #[test]
    fn one_of_is_enforced_or_refused() {
        let kind = |kind: &str| json!({"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]});
        let taken = [
            json!({"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}),
            json!({"oneOf": [kind("a"), kind("b"), {"type": "array"}]}),
            json!({"$defs": {"a": kind("a"), "b": kind("b")}, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}),
        ];
        for schema in taken {
            checked(&Schema::new("s", schema.clone())).unwrap_or_else(|e| panic!("{schema}: {e}"));
        }
        let refused = [
            (
                json!({"oneOf": [{"type": "number"}, {"type": "integer"}]}),
                "`s.oneOf` cannot be enforced: its alternatives 0 and 1",
            ),
            (json!({"oneOf": [{"type": "string"}, {"type": "null"}, {}]}), "alternatives 0 and 2"),
            (json!({"properties": {"x": {"oneOf": [kind("a"), kind("a")]}}}), "`s.properties.x.oneOf`"),
            (json!({"oneOf": vec![json!({}); 65]}), "`s.oneOf` has 65 alternatives"),
        ];
        for (schema, expected) in refused {
            let error = checked(&Schema::new("s", schema.clone())).unwrap_err().to_string();
            assert!(error.contains(expected), "{schema}: {error}");
        }
    }

    /// Regression: each pair of each `oneOf` had 4096 steps. This schema of 56 kB took 16 seconds, even after
    /// its client had disconnected.
    #[test]
    fn all_one_of_of_a_schema_share_their_steps() {
        let way =
            |at: usize| json!({"anyOf": (0..34).map(|n| json!({"const": at * 34 + n})).collect::<Vec<_>>()});
        let defs: Map<String, Value> = (0..64).map(|at| (at.to_string(), way(at))).collect();
        let refs: Vec<Value> = (0..64).map(|at| json!({"$ref": format!("#/$defs/{at}")})).collect();
        let of = |n: usize| json!({"$defs": defs, "prefixItems": vec![json!({"oneOf": refs}); n]});
        for n in [1, 16] {
            let error = checked(&Schema::new("s", of(n))).unwrap_err();
            assert_eq!(error.param, "s.prefixItems[0].oneOf");
            let steps = of(n).to_string().len() * STEPS_PER_BYTE;
            assert!(error.problem.contains(&format!("takes more than the {steps} steps")), "{error}");
        }
        // Each of these alone fits into the budget, all together do not.
        let few = |n: usize| json!({"$defs": defs, "prefixItems": vec![json!({"oneOf": refs[..6]}); n]});
        checked(&Schema::new("s", few(1))).unwrap();
        let error = checked(&Schema::new("s", few(60))).unwrap_err();
        assert!(
            error.param.starts_with("s.prefixItems[") && error.param != "s.prefixItems[0].oneOf",
            "{error}"
        );
        assert!(error.problem.contains("steps"), "{error}");
        // The largest `oneOf` with ordinary alternatives fits into the budget.
        let kind = |at: usize| json!({"type": "object", "properties": {"kind": {"const": format!("k{at}")}, "v": {"type": "string"}}, "required": ["kind", "v"]});
        let usual: Map<String, Value> = (0..64).map(|at| (at.to_string(), kind(at))).collect();
        checked(&Schema::new("s", json!({"$defs": usual, "oneOf": refs}))).unwrap();
        let last = |at: usize| json!({"type": "object", "properties": {"kind": {"const": at}}, "required": ["kind"]});
        checked(&Schema::new("s", json!({"oneOf": (0..64).map(last).collect::<Vec<_>>()}))).unwrap();
        // The client has disconnected.
        let halt = halt::Halt::default();
        halt.cancel();
        let schema = Schema::new("s", json!({"oneOf": [{"type": "string"}, {"type": "null"}]}));
        let error = halt.run(|| checked(&schema)).unwrap_err();
        assert!(error.param == "s.oneOf" && error.problem.contains("time"), "{error}");
        checked(&schema).unwrap();
        assert!(error.halted);
        let wrong = checked(&Schema::new("s", json!({"type": 1}))).unwrap_err();
        assert!(!wrong.halted);
    }
}
