// Which of several equal parts a number belongs to is the body's matter: it has the arrays.
template <int COUNT, int START, typename T>
inline T number_at(const device T* array, uint index) {
  return array[START + index % COUNT];
}
