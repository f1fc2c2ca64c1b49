// What a program needs of a bundle to launch its kernels by a driver: kernel.json, read, with the numbers for one call.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace bundle {

// A JSON value; whole numbers only, which is all that launches have.
struct Json {
  enum Kind { kNull, kBool, kNumber, kText, kList, kObject } kind = kNull;
  int64_t number = 0;
  std::string text;
  std::vector<Json> items;
  std::map<std::string, Json> fields;

  const Json& operator[](const std::string& name) const {
    auto found = fields.find(name);
    if (found == fields.end()) throw std::runtime_error("kernel.json has no " + name + "; build the bundle again");
    return found->second;
  }
  bool has(const std::string& name) const { return fields.count(name) && fields.at(name).kind != kNull; }
};

class Parser {
 public:
  explicit Parser(const std::string& text) : at_(text.c_str()) {}

  Json value() {
    Json made;
    char next = peek();
    if (next == '"') {
      made.kind = Json::kText, made.text = text();
    } else if (next == '[' || next == '{') {
      bool list = *at_++ == '[';
      made.kind = list ? Json::kList : Json::kObject;
      while (peek() != (list ? ']' : '}')) {
        if (list) {
          made.items.push_back(value());
        } else {
          std::string name = (peek(), text());
          expect(':');
          made.fields[name] = value();
        }
        if (peek() == ',') ++at_;
      }
      ++at_;
    } else {
      const char* start = at_;
      while (*at_ && !std::strchr(",]} \n\t\r", *at_)) ++at_;
      std::string word(start, at_);
      if (word != "null") made.kind = word == "true" || word == "false" ? Json::kBool : Json::kNumber;
      made.number = made.kind == Json::kBool ? word == "true" : std::strtoll(word.c_str(), nullptr, 10);
    }
    return made;
  }

 private:
  char peek() {
    while (*at_ && std::strchr(" \n\t\r", *at_)) ++at_;
    if (!*at_) throw std::runtime_error("kernel.json ends early");
    return *at_;
  }
  void expect(char wanted) {
    if (peek() != wanted) throw std::runtime_error(std::string("kernel.json lacks a ") + wanted);
    ++at_;
  }
  std::string text() {  // an escaped character stands for itself: names have none
    std::string made;
    for (++at_; *at_ && *at_ != '"'; ++at_) made += *at_ == '\\' ? *++at_ : *at_;
    ++at_;
    return made;
  }
  const char* at_;
};

using Sizes = std::map<std::string, int64_t>;

// A formula: a number, the name of a size, or [operation, formula, formula].
inline int64_t value(const Json& formula, const Sizes& sizes) {
  if (formula.kind == Json::kNumber) return formula.number;
  if (formula.kind == Json::kText) return sizes.at(formula.text);
  int64_t a = value(formula.items.at(1), sizes), b = value(formula.items.at(2), sizes);
  const std::string& operation = formula.items[0].text;
  if (operation == "+") return a + b;
  if (operation == "-") return a - b;
  if (operation == "*") return a * b;
  if (operation == "/") return a / b;
  if (operation == "%") return a % b;
  if (operation == "min") return std::min(a, b);
  if (operation == "max") return std::max(a, b);
  throw std::runtime_error("kernel.json has a formula with " + operation);
}

template <typename T>
std::vector<T> values(const Json& formulas, const Sizes& sizes) {
  std::vector<T> made;
  for (const Json& each : formulas.items) made.push_back(static_cast<T>(value(each, sizes)));
  return made;
}

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Tensor {
  std::string name, bytes;
  bool output;
};

struct Call {
  Json manifest;
  std::string code;  // a cubin or a code object
  std::vector<Tensor> tensors;
  Sizes sizes;
  const Json& launches() const { return manifest["launches"]; }
};

// The bundle in `folder`, built for `kind`, to be called with inputs of the bytes in `files`, in order.  The extents at
// run time follow from the bytes of the first input that has them.
inline Call open(const std::string& folder, const std::string& kind, const std::vector<std::string>& files) {
  std::string text = contents(folder + "/kernel.json");
  Call call{Parser(text).value(), contents(folder + (kind == "cuda" ? "/kernel.cubin" : "/kernel.hsaco")), {}, {}};
  if (call.manifest["target"]["kind"].text != kind) throw std::runtime_error(folder + " is not for " + kind);
  if (call.launches().has("why")) throw std::runtime_error(call.launches()["why"].text);
  std::map<std::string, int64_t> extents;  // at run time, by the word for the axis
  size_t given = 0;
  for (const Json& argument : call.manifest["arguments"].items) {
    Tensor tensor{argument["name"].text, "", argument["output"].number != 0};
    std::string digits = argument["dtype"].text.substr(argument["dtype"].text.find_first_of("0123456789"));
    int64_t bytes = std::stoi(digits) / 8, axis = -1;
    std::string word = argument.has("ranged_axis") ? "ranged_axis" : "runtime_axis";
    if (argument.has(word)) axis = argument[word].number;
    const std::vector<Json>& shape = argument["shape"].items;
    for (size_t i = 0; i < shape.size(); ++i) bytes *= static_cast<int64_t>(i) == axis ? 1 : shape[i].number;
    if (!tensor.output) tensor.bytes = contents(files.at(given++));
    if (axis >= 0 && !extents.count(word)) extents[word] = static_cast<int64_t>(tensor.bytes.size()) / bytes;
    int64_t wanted = axis < 0 ? bytes : bytes * extents[word];
    if (tensor.output) tensor.bytes.assign(wanted, '\0');
    if (!wanted || static_cast<int64_t>(tensor.bytes.size()) != wanted)
      throw std::runtime_error(tensor.name + " has " + std::to_string(tensor.bytes.size()) + " bytes, needed " +
                               std::to_string(wanted));
    for (const auto& [name, place] : call.launches()["sizes"].fields)
      if (place.items.at(0).text == tensor.name) call.sizes[name] = extents.at(word);
    call.tensors.push_back(tensor);
  }
  return call;
}

// The files for the inputs, then for the outputs, of `words`; the outputs are written to the latter.
inline void write_outputs(const Call& call, const std::vector<std::string>& files) {
  size_t at = 0;
  for (const Tensor& tensor : call.tensors) at += !tensor.output;
  for (const Tensor& tensor : call.tensors) {
    if (!tensor.output) continue;
    std::ofstream file(files.at(at++), std::ios::binary);
    if (!file.write(tensor.bytes.data(), static_cast<std::streamsize>(tensor.bytes.size())))
      throw std::runtime_error(files[at - 1] + " cannot be written");
  }
}

// What a program's main does: `run` with the bundle's folder and the files; an error is one line.
inline int main_of(const char* name, int argc, char** argv,
                   void (*run)(const std::string& folder, const std::vector<std::string>& files)) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s BUNDLE INPUT... OUTPUT...\n", name);
    return 2;
  }
  try {
    run(argv[1], {argv + 2, argv + argc});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}

}  // namespace bundle
